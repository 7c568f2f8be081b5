"""Queries and keys rotated, values and gates told apart: definition and kernel."""

from still_kernels.rotary_qkv.inputs import Inputs
from still_kernels.rotary_qkv.naive import naive_rotary_qkv

__all__ = ["Inputs", "naive_rotary_qkv"]
