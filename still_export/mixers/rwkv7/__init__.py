"""RWKV-7's two kinds of layers, each after a shift of one token."""
