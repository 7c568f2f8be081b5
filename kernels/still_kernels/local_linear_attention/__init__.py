"""Softmax attention with values corrected to first order in the keys: definition."""
