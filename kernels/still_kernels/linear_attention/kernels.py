"""Triton's functions of still::LinearAttention, by kernel."""

from __future__ import annotations

from still_kernels.linear_attention.triton_decode import decode_kernel
from still_kernels.linear_attention.triton_output import output_kernel
from still_kernels.linear_attention.triton_prepare import prepare_kernel
from still_kernels.linear_attention.triton_scan import scan_kernel

FUNCTIONS = {"prepare": prepare_kernel, "scan": scan_kernel, "output": output_kernel, "decode": decode_kernel}
