"""Routing Transformer (arXiv:2003.05997), in a causal reading."""

MODEL_TYPES = ("routing_transformer",)
