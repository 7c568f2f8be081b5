"""Routing Transformer (arXiv:2003.05997), read causally."""

MODEL_TYPES = ("routing_transformer",)
