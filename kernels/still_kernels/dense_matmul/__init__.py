"""Products with weights of 16-bit numbers, sums in float32: definition and kernels."""

from still_kernels.dense_matmul.inputs import Inputs
from still_kernels.dense_matmul.naive import naive_dense_matmul

__all__ = ["Inputs", "naive_dense_matmul"]
