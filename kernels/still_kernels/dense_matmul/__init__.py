"""Linear layers with weights of 16-bit numbers: definition and kernels."""

from still_kernels.dense_matmul.op import OP, Inputs, Variant, naive_dense_matmul

__all__ = ["OP", "Inputs", "Variant", "naive_dense_matmul"]
