"""Softmax attention with values corrected to first order in the keys: Parallax, and local linear attention."""
