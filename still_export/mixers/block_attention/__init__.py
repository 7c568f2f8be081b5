"""Softmax layers whose tokens read chosen blocks, over the ops still::SelectBlocks and still::BlockAttention."""
