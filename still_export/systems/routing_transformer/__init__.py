"""Routing Transformer (arXiv:2003.05997), read causally."""
