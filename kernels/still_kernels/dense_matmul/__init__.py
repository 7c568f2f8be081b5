"""Linear layers with weights of 16-bit numbers: definition and kernels."""
