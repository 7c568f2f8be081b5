"""Linear layers with 4- or 8-bit weights in blocks: definition and kernels."""
