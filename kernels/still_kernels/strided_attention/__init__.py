"""Softmax attention to the last token of each earlier chunk: definition."""
