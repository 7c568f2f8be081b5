"""A product with two thin matrices: definition and kernels."""

from still_kernels.low_rank_matmul.inputs import Inputs
from still_kernels.low_rank_matmul.naive import naive_low_rank_matmul

__all__ = ["Inputs", "naive_low_rank_matmul"]
