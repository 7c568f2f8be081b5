"""Landmark attention (arXiv:2305.16300)."""
