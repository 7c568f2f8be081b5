"""Softmax attention to the last token of each earlier chunk: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "strided_attention"]

__getattr__ = offers(__name__, "naive")
