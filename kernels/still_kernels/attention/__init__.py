"""Causal softmax attention with a cache: definition, PyTorch form, kernels."""
