"""Keys and values rounded to 8-bit caches: definition and kernels."""
