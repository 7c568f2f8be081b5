"""The past blocks that each token reads: definition and kernels."""
