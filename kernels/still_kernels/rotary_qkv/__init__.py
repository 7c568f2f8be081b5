"""Queries and keys rotated, values and gates told apart: definition and kernels."""

from still_kernels.rotary_qkv.op import OP, Inputs, Variant, naive_rotary_qkv

__all__ = ["OP", "Inputs", "Variant", "naive_rotary_qkv"]
