"""Feed-forward layers with gates: definition and kernels."""
