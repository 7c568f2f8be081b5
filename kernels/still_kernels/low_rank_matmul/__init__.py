"""Two GEMMs with thin matrices: definition and kernels."""

from still_kernels.low_rank_matmul.op import OP, Inputs, Variant, naive_low_rank_matmul

__all__ = ["OP", "Inputs", "Variant", "naive_low_rank_matmul"]
