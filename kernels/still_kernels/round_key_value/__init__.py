"""Keys and values as caches in 8 bits hold them: definition and kernels."""
