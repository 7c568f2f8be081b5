"""AllMem (arXiv:2602.13680), read by LaCT (arXiv:2505.23884)."""
