"""Experts with 4- or 8-bit matrices: definition."""
