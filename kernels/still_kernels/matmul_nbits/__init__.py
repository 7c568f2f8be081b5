"""Linear layers with weights of 4 or 8 bits in blocks: definition and kernels."""

from still_kernels.matmul_nbits.op import OP, Inputs, Variant, naive_matmul_nbits

__all__ = ["OP", "Inputs", "Variant", "naive_matmul_nbits"]
