"""Runs the plan of still::DenseMatMul with Triton."""

from __future__ import annotations

from still_kernels.dense_matmul.triton_products import few_kernel, many_kernel, norm_kernel
from still_kernels.dense_matmul.triton_split import split_kernel
from still_kernels.dense_matmul.triton_tma import many_tma_kernel
from still_kernels.dense_matmul.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {
    "norm": norm_kernel,
    "few": few_kernel,
    "split": split_kernel,
    "some": many_kernel,
    "some_tma": many_tma_kernel,
    "many": many_kernel,
    "many_tma": many_tma_kernel,
}

_OP = Stateless(KERNELS, build)
launch_dense_matmul = _OP.launch
triton_dense_matmul = _OP.run_one
"""`naive_dense_matmul` by the kernels; results and errors alike."""
