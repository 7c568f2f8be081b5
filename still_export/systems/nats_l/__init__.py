"""NAtS-L (arXiv:2602.03681)."""
