"""Experts whose matrices have 4 or 8 bits: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "naive_experts_nbits"]

__getattr__ = offers(__name__, "naive")
