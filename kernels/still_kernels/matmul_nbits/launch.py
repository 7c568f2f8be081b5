"""Runs the plan of still::MatMulNBits with Triton."""

from __future__ import annotations

from still_kernels.matmul_nbits.gluon_few import few_kernel
from still_kernels.matmul_nbits.triton_many import multiply_kernel, unpack_kernel
from still_kernels.matmul_nbits.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {"few": few_kernel, "unpack": unpack_kernel, "multiply": multiply_kernel}

_OP = Stateless(KERNELS, build)
launch_matmul_nbits = _OP.launch
triton_matmul_nbits = _OP.run_one
"""`naive_matmul_nbits` by the kernels; results and errors alike."""
