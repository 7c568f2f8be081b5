"""Rows times a weight, with an optional norm before and sum after."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_gemm import block_of, copied_block, gemm_block, norm_kernel, split_block
from still_kernels.dense_matmul.triton_float8 import FUNCTIONS as FLOAT8


@triton.jit(do_not_specialize=["M", "N", "K"])
def few_kernel(p_input, p_norm_weight, p_weight, p_turned_weight, p_residual, p_output, M, N, K, epsilon, BN: tl.constexpr,
               BK: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """p_input [M, K], normed where there is p_norm_weight [K], times p_weight [K, N] (p_turned_weight [N, K]), plus p_residual [M, N].
    Grid (ceil(M / 16), ceil(N / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row = tl.program_id(0) * 16 + tl.arange(0, 16)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    gemm_block(
        p_input, p_weight, p_turned_weight, p_residual, p_output, o_row, o_output, M, N, K, 16, BN, BK, STAGES, False,
        p_norm_weight, epsilon,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_kernel(p_rows, p_weight, p_turned_weight, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The same for many rows. Grid (ceil(M / BM) * ceil(N / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row, o_output = block_of(tl.program_id(0), M, N, BM, BN, GROUP)
    gemm_block(
        p_rows, p_weight, p_turned_weight, p_residual, p_output, o_row, o_output, M, N, K, BM, BN, BK, STAGES, WHOLE
    )


@triton.jit(do_not_specialize=["M", "N", "K"])
def split_kernel(p_rows, p_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, BN: tl.constexpr, BK: tl.constexpr,
                  STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """p_rows [M, K] times p_weight [K, N], plus p_residual [M, N]. Grid, p_partial and p_arrivals as of split_block."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    split_block(p_rows, p_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, BN, BK, STAGES, WHOLE)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_tma_kernel(d_rows, d_weight, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    GROUP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """As copied_block."""
    N = N // 8 * 8  # which tells the compiler
    copied_block(d_rows, d_weight, p_residual, p_output, M, N, K, BM, BN, BK, GROUP, STAGES)


FUNCTIONS = {
    "norm": norm_kernel,
    "few": few_kernel,
    "split": split_kernel,
    "some": many_kernel,
    "some_tma": many_tma_kernel,
    "many": many_kernel,
    "many_tma": many_tma_kernel,
    **FLOAT8,
}
