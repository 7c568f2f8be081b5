"""Of each token the latest ones before it that are of its cluster: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "cluster_tokens"]

__getattr__ = offers(__name__, "naive")
