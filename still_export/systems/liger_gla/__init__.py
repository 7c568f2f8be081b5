"""Liger-GLA (arXiv:2503.01496)."""
