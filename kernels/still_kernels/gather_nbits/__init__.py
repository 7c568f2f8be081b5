"""Rows of a weight of K-quants: definition."""
