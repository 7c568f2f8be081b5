"""Queries and keys rotated, values and gates told apart: definition and kernels."""
