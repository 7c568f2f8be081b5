"""AllMem (arXiv:2602.13680), with LaCT's memory (arXiv:2505.23884)."""
