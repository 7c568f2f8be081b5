"""The two kinds of layers of RWKV-5 and RWKV-6, each after a shift of one token."""
