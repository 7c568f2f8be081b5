"""Softmax attention to blocks by way of a landmark: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "landmark_attention"]

__getattr__ = offers(__name__, "naive")
