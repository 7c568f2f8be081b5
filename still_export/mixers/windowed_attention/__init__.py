"""Softmax layers of linear families that see the latest tokens alone, over the op still::HybridAttention."""
