"""Softmax layers that see everything, or sinks and a window, as a sequence's first call decides (Flux Attention)."""
