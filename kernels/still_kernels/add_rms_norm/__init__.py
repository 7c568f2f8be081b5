"""A sum and its norm: definition and kernels."""

from still_kernels.add_rms_norm.op import OP, Inputs, Variant, naive_add_rms_norm

__all__ = ["OP", "Inputs", "Variant", "naive_add_rms_norm"]
