"""Runs the plan of still::RoundKeyValue with Triton."""

from __future__ import annotations

from still_kernels.round_key_value.triton_round import round_kernel
from still_kernels.round_key_value.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {"round": round_kernel}

_OP = Stateless(KERNELS, build)
launch_round_key_value = _OP.launch
triton_round_key_value = _OP.run
"""`naive_round_key_value` by the kernel; results and errors alike."""
