"""Two products of the same rows, one of which gates the other; and the product behind them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.dense_matmul.triton_few import GROUP, WHOLE_INNER, few_block, left_block, right_block, scales_of
from still_kernels.dense_matmul.triton_products import block_of, left_of, product_block, right_of, store_block
from still_kernels.triton_shared import wait_for_the_one_ahead


@triton.jit
def _gated_block(p_rows, p_gate_up, p_middle, o_row, o_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 STAGES: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """silu(gate) * up of the rows `o_row` [BM] for the outputs `o_output` [BN]; gates are the first N of 2 * N columns. WHOLE: K is a
    multiple of BK."""
    p_left = left_of(p_rows, o_row, M, K, BK)
    p_gate = right_of(p_gate_up, o_output, 2 * N, BK)
    o_inner = tl.arange(0, BK)
    m_output = (o_output < N)[None, :]
    b_gate = tl.zeros([BM, BN], tl.float32)
    b_up = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        m_inner = o_inner < (BK if WHOLE else K - begin)
        b_left = tl.load(p_left + begin, mask=m_inner[None, :], other=0.0)
        m_right = m_inner[:, None] & m_output
        b_gate = tl.dot(b_left, tl.load(p_gate, mask=m_right, other=0.0), b_gate)
        b_up = tl.dot(b_left, tl.load(p_gate + N, mask=m_right, other=0.0), b_up)
        p_gate += 2 * BK * N
    store_block(p_middle, b_gate / (1 + tl.exp(-b_gate)) * b_up, o_row, o_output, M, N)


@triton.jit(do_not_specialize=["M", "N", "K"])
def few_gated_kernel(p_input, p_norm_weight, p_gate_up, p_middle, M, N, K, epsilon, BN: tl.constexpr, BK: tl.constexpr,
                     STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """p_middle [M, N] of p_input [M, K], normed, and p_gate_up [K, 2 * N]. Grid (ceil(M / 16), ceil(N / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    EVEN: tl.constexpr = WHOLE and WHOLE_INNER % BK == 0
    o_row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    o_inner = tl.arange(0, BK)
    m_row, m_output = o_row < M, (o_output < N)[None, :]
    p_left = p_input + o_row.to(tl.int64)[:, None] * K + o_inner[None, :]
    p_gate = right_of(p_gate_up, o_output, 2 * N, BK)
    wait_for_the_one_ahead(PDL)
    b_scale = scales_of(p_input, o_row, M, K, epsilon)
    b_gate = tl.zeros([GROUP, BN], tl.float32)
    b_up = tl.zeros([GROUP, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        b_left = left_block(p_left, p_norm_weight, b_scale, m_row, o_inner + begin, K, EVEN)
        m_inner = (o_inner + begin < K)[:, None]
        b_gate = tl.dot(b_left, right_block(p_gate, m_output, m_inner, EVEN), b_gate)
        b_up = tl.dot(b_left, right_block(p_gate + N, m_output, m_inner, EVEN), b_up)
        p_left += BK
        p_gate += 2 * BK * N
    store_block(p_middle, b_gate / (1 + tl.exp(-b_gate)) * b_up, o_row, o_output, M, N)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_gated_kernel(p_rows, p_gate_up, p_middle, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      GROUP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """p_middle [M, N] of p_rows [M, K], normed before, and p_gate_up [K, 2 * N]. Grid (ceil(M / BM) * ceil(N / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row, o_output = block_of(tl.program_id(0), M, N, BM, BN, GROUP)
    _gated_block(p_rows, p_gate_up, p_middle, o_row, o_output, M, N, K, BM, BN, BK, STAGES, WHOLE)


@triton.jit(do_not_specialize=["M", "N", "K"])
def few_down_kernel(p_middle, p_down, p_input, p_output, p_partial, p_arrivals, M, N, K, BN: tl.constexpr, BK: tl.constexpr,
                    STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """p_output [M, K] = p_input + p_middle [M, N] times p_down [N, K]. Grid, p_partial and p_arrivals as
    those of few_kernel."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    few_block(
        p_middle, None, p_down, None, p_input, p_output, p_partial, p_arrivals, M, K, N, 0.0, BN, BK, STAGES, WHOLE, PDL
    )


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_down_kernel(p_middle, p_down, p_input, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                     GROUP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The same as few_down_kernel for many rows. Grid (ceil(M / BM) * ceil(K / BN))."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    o_row, o_output = block_of(tl.program_id(0), M, K, BM, BN, GROUP)
    product_block(p_middle, p_down, None, p_input, p_output, o_row, o_output, M, K, N, BM, BN, BK, STAGES, WHOLE)
