"""Flux Attention (arXiv:2604.07394)."""
