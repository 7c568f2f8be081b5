"""Softmax attention to blocks by way of a landmark: definition."""
