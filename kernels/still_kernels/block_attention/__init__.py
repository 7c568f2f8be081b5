"""Causal softmax attention with a cache, of each token to chosen blocks: definition and kernels."""
