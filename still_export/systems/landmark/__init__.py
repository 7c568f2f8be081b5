"""Landmark attention (arXiv:2305.16300)."""

MODEL_TYPES = ("llama_with_landmark",)
