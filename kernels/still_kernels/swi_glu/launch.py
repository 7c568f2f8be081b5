"""Runs the plan of still::SwiGlu with Triton."""

from __future__ import annotations

from still_kernels.stateless import Stateless
from still_kernels.swi_glu.triton_swi_glu import swi_glu_kernel
from still_kernels.swi_glu.variants import KERNELS, build

FUNCTIONS = {"swi_glu": swi_glu_kernel}

_OP = Stateless(KERNELS, build)
launch_swi_glu = _OP.launch
triton_swi_glu = _OP.run_one
"""`naive_swi_glu` by the kernel; results and errors alike."""
