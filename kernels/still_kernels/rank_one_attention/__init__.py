"""Linear attention whose state each token multiplies with a diagonal matrix and one of rank one: definition and chunks."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "chunked_rank_one_attention", "naive_rank_one_attention"]

__getattr__ = offers(__name__, "naive", "chunked")
