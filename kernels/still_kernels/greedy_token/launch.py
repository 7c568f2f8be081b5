"""Runs the plan of still::GreedyToken with Triton."""

from __future__ import annotations

from still_kernels.greedy_token.triton_token import greedy_kernel
from still_kernels.greedy_token.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {"greedy": greedy_kernel}

_OP = Stateless(KERNELS, build)
launch_greedy_token = _OP.launch
triton_greedy_token = _OP.run_one
"""`naive_greedy_token` by the kernel; results and errors alike."""
