"""Causal softmax attention with a cache, of each token to chosen blocks: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "block_attention"]

__getattr__ = offers(__name__, "naive")
