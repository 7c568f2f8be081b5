"""Runs the plan of still::RotaryQkv with Triton."""

from __future__ import annotations

from still_kernels.rotary_qkv.triton_rotary import rotary_kernel
from still_kernels.rotary_qkv.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {"rotary": rotary_kernel}

_OP = Stateless(KERNELS, build)
launch_rotary_qkv = _OP.launch
triton_rotary_qkv = _OP.run
"""`naive_rotary_qkv` by the kernel; results and errors alike."""
