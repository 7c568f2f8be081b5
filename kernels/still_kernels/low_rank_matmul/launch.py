"""Runs the plan of still::LowRankMatMul with Triton."""

from __future__ import annotations

from still_kernels.low_rank_matmul.triton_low_rank import low_rank_kernel, lower_kernel, raise_kernel
from still_kernels.low_rank_matmul.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {"low_rank": low_rank_kernel, "lower": lower_kernel, "raise": raise_kernel}

_OP = Stateless(KERNELS, build)
launch_low_rank_matmul = _OP.launch
triton_low_rank_matmul = _OP.run_one
"""`naive_low_rank_matmul` by the kernels; results and errors alike."""
