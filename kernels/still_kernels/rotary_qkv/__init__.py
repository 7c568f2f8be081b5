"""Rotated queries and keys, split values and gates: definition and kernels."""
