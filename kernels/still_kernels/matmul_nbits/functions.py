"""Triton's functions of still::MatMulNBits, by kernel."""

from __future__ import annotations

from still_kernels.matmul_nbits.gluon_few import few_kernel
from still_kernels.matmul_nbits.triton_many import multiply_kernel, unpack_kernel

FUNCTIONS = {"few": few_kernel, "unpack": unpack_kernel, "multiply": multiply_kernel}
