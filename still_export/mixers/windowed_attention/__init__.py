"""Softmax layers with a window, in linear families, over the op still::HybridAttention."""
