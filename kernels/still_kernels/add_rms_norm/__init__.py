"""A sum and its norm: definition and kernels."""
