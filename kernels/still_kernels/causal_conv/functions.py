"""Triton's functions of still::CausalConv, by kernel."""

from __future__ import annotations

from still_kernels.causal_conv.triton_conv import commit_kernel, conv_kernel, step_kernel

FUNCTIONS = {"conv": conv_kernel, "commit": commit_kernel, "step": step_kernel}
