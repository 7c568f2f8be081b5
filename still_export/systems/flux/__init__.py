"""Flux Attention (arXiv:2604.07394)."""

MODEL_TYPES = ("flux_qwen3",)
