"""Linear layers with weights of 4 or 8 bits in blocks: definition and kernels."""
