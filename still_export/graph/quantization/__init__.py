"""Low-bit weights: bits by role, rounding methods, storage in a graph."""
