"""Softmax attention to blocks through landmarks: definition."""
