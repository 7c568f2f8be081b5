"""Linear layers with 16-bit or e4m3 weights: definition and kernels."""
