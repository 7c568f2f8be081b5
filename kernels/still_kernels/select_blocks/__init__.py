"""Which blocks of the past each token reads: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "naive_select_blocks"]

__getattr__ = offers(__name__, "naive")
