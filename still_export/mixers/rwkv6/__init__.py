"""RWKV-7's two kinds of layers, each behind a shift of one token."""
