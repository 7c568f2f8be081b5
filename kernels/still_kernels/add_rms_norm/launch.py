"""Runs the plan of still::AddRmsNorm with Triton."""

from __future__ import annotations

from still_kernels.add_rms_norm.triton_norm import add_norm_kernel
from still_kernels.add_rms_norm.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {"add_norm": add_norm_kernel}

_OP = Stateless(KERNELS, build)
launch_add_rms_norm = _OP.launch
triton_add_rms_norm = _OP.run
"""`naive_add_rms_norm` by the kernel; results and errors alike."""
