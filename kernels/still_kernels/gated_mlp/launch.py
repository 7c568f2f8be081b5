"""Runs the plan of still::GatedMlp with Triton."""

from __future__ import annotations

from still_kernels.dense_matmul.triton_products import norm_kernel
from still_kernels.gated_mlp.triton_gated import (
    few_down_kernel,
    few_gated_kernel,
    many_down_kernel,
    many_down_tma_kernel,
    many_gated_kernel,
    many_gated_tma_kernel,
    split_down_kernel,
)
from still_kernels.gated_mlp.variants import KERNELS, build
from still_kernels.stateless import Stateless

FUNCTIONS = {
    "norm": norm_kernel,
    "few_gated": few_gated_kernel,
    "few_down": few_down_kernel,
    "split_down": split_down_kernel,
    "some_gated": many_gated_kernel,
    "some_gated_tma": many_gated_tma_kernel,
    "some_down": many_down_kernel,
    "some_down_tma": many_down_tma_kernel,
    "many_gated": many_gated_kernel,
    "many_gated_tma": many_gated_tma_kernel,
    "many_down": many_down_kernel,
    "many_down_tma": many_down_tma_kernel,
}

_OP = Stateless(KERNELS, build)
launch_gated_mlp = _OP.launch
triton_gated_mlp = _OP.run_one
"""`naive_gated_mlp` by the kernels; results and errors alike."""
