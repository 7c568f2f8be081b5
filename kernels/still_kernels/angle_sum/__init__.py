"""Angles that add up over tokens: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "naive_angle_sum"]

__getattr__ = offers(__name__, "naive")
