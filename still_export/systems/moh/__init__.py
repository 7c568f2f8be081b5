"""MoH, mixture-of-head attention (arXiv:2410.11842)."""

MODEL_TYPES = ("moh_llama",)
