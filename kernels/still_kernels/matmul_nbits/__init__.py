"""Products with weights of 4 or 8 bits in blocks: definition and kernels."""

from still_kernels.matmul_nbits.inputs import Inputs
from still_kernels.matmul_nbits.naive import naive_matmul_nbits

__all__ = ["Inputs", "naive_matmul_nbits"]
