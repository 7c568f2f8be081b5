"""Backward pass of whole sequences."""
