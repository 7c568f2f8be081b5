"""Rows of a K-quant weight: definition."""
