"""The gate of a feed-forward layer: definition and kernels."""
