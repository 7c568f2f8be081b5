"""Which experts each token goes to: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "naive_route"]

__getattr__ = offers(__name__, "naive")
