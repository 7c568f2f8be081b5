"""The likeliest token: definition and kernels."""
