"""Two GEMMs of the same rows, one of which gates the other; and the GEMM of the result."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_gemm import (
    block_of,
    copied_block,
    corner_of,
    gemm_block,
    left_of,
    norm_kernel,
    normed_block,
    right_of,
    scales_of,
    split_block,
    store_block,
)


@triton.jit
def _gated(b_gate, b_up):
    """silu(gate) * up."""
    return b_gate / (1 + tl.exp(-b_gate)) * b_up


@triton.jit
def _gated_block(p_rows, p_gate_up, p_middle, o_row, o_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 STAGES: tl.constexpr, WHOLE: tl.constexpr, p_norm_weight=None, epsilon=0.0):  # fmt: skip
    """silu(gate) * up of the rows `o_row` [BM] for the outputs `o_output` [BN]; gates are the first N of 2 * N columns. WHOLE: K is a
    multiple of BK."""
    p_left = left_of(p_rows, o_row, M, K, BK)
    p_gate = right_of(p_gate_up, o_output, 2 * N, BK)
    o_inner = tl.arange(0, BK)
    m_output = (o_output < N)[None, :]
    if p_norm_weight is not None:
        b_scale = scales_of(p_left, o_row < M, K, epsilon, BM, BK)
    b_gate = tl.zeros([BM, BN], tl.float32)
    b_up = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        m_inner = o_inner < (BK if WHOLE else K - begin)
        b_left = tl.load(p_left + begin, mask=m_inner[None, :], other=0.0)
        if p_norm_weight is not None:
            b_left = normed_block(b_left, p_norm_weight, b_scale, begin + o_inner, m_inner)
        m_right = m_inner[:, None] & m_output
        b_gate = tl.dot(b_left, tl.load(p_gate, mask=m_right, other=0.0), b_gate)
        b_up = tl.dot(b_left, tl.load(p_gate + N, mask=m_right, other=0.0), b_up)
        p_gate += 2 * BK * N
    store_block(p_middle, _gated(b_gate, b_up), o_row, o_output, M, N)


@triton.jit(do_not_specialize=["M", "N", "K"])
def few_gated_kernel(p_input, p_norm_weight, p_gate_up, p_middle, M, N, K, epsilon, BN: tl.constexpr, BK: tl.constexpr,
                     STAGES: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """p_middle [M, N] of p_input [M, K], normed, and p_gate_up [K, 2 * N]. Grid (ceil(M / 16), ceil(N / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row = tl.program_id(0) * 16 + tl.arange(0, 16)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    _gated_block(
        p_input, p_gate_up, p_middle, o_row, o_output, M, N, K, 16, BN, BK, STAGES, False, p_norm_weight, epsilon
    )


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_gated_kernel(p_rows, p_gate_up, p_middle, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      GROUP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The same for many rows. Grid (ceil(M / BM) * ceil(N / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row, o_output = block_of(tl.program_id(0), M, N, BM, BN, GROUP)
    _gated_block(p_rows, p_gate_up, p_middle, o_row, o_output, M, N, K, BM, BN, BK, STAGES, WHOLE)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_gated_tma_kernel(d_rows, d_gate_up, p_middle, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                          GROUP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The same, blocks copied by TMA."""
    N = N // 8 * 8  # which tells the compiler
    row, output = corner_of(tl.program_id(0), M, N, BM, BN, GROUP)
    b_gate = tl.zeros([BM, BN], tl.float32)
    b_up = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        b_left = d_rows.load([row, begin])
        b_gate = tl.dot(b_left, d_gate_up.load([begin, output]), b_gate)
        b_up = tl.dot(b_left, d_gate_up.load([begin, N + output]), b_up)
    store_block(p_middle, _gated(b_gate, b_up), row + tl.arange(0, BM), output + tl.arange(0, BN), M, N)


@triton.jit(do_not_specialize=["M", "N", "K"])
def few_down_kernel(p_middle, p_down, p_input, p_output, M, N, K, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
                    ALIGNED: tl.constexpr):  # fmt: skip
    """p_output [M, K] = p_input + p_middle [M, N] times p_down [N, K]. Grid (ceil(M / 16), ceil(K / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row = tl.program_id(0) * 16 + tl.arange(0, 16)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    gemm_block(p_middle, p_down, None, p_input, p_output, o_row, o_output, M, K, N, 16, BN, BK, STAGES, False)


@triton.jit(do_not_specialize=["M", "N", "K"])
def split_down_kernel(p_middle, p_down, p_input, p_output, p_partial, p_arrivals, M, N, K, BN: tl.constexpr, BK: tl.constexpr,
                      STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The same by programs that share the N. Grid, p_partial and p_arrivals as of split_block."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    split_block(p_middle, p_down, p_input, p_output, p_partial, p_arrivals, M, K, N, BN, BK, STAGES, WHOLE)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_down_kernel(p_middle, p_down, p_input, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                     GROUP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The same as few_down_kernel for many rows. Grid (ceil(M / BM) * ceil(K / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row, o_output = block_of(tl.program_id(0), M, K, BM, BN, GROUP)
    gemm_block(p_middle, p_down, None, p_input, p_output, o_row, o_output, M, K, N, BM, BN, BK, STAGES, WHOLE)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_down_tma_kernel(d_middle, d_down, p_input, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                         GROUP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The same, blocks copied by TMA."""
    K = K // 8 * 8  # which tells the compiler
    copied_block(d_middle, d_down, p_input, p_output, M, K, N, BM, BN, BK, GROUP, STAGES)


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
