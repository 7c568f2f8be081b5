"""Triton's functions of still::Attention, by kernel."""

from __future__ import annotations

from still_kernels.attention.triton_attend import attend_kernel
from still_kernels.attention.triton_decode import decode_kernel

FUNCTIONS = {"attend": attend_kernel, "decode": decode_kernel}
