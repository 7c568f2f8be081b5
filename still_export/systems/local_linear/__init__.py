"""Local linear attention (arXiv:2510.01450) and Parallax (arXiv:2605.29157)."""

MODEL_TYPES = ("parallax", "local_linear")
