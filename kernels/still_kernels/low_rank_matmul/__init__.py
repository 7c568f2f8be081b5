"""Two GEMMs with thin matrices: definition and kernels."""
