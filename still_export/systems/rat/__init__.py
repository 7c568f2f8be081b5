"""RAT (arXiv:2507.04416)."""

MODEL_TYPES = ("rat",)
