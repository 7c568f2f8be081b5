"""Two GEMMs with thin matrices: in one launch for few rows, in two for many."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_gemm import block_of, gemm_block, left_of, right_of, store_block


@triton.jit(do_not_specialize=["M", "N", "K", "R"])
def low_rank_kernel(p_input, p_inner, p_outer, p_base, p_output, M, N, K, R, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
               STAGES: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """p_output [M, N] = p_base [M, N] + (p_input [M, K] p_inner [K, R]) p_outer [R, N]. Grid (ceil(M / 16), ceil(N / BN))."""
    if ALIGNED:
        N, K, R = N // 8 * 8, K // 8 * 8, R // 8 * 8  # which tells the compiler
    o_row = tl.program_id(0) * 16 + tl.arange(0, 16)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    place = o_row.to(tl.int64)[:, None] * N + o_output[None, :]
    m_tile = (o_row < M)[:, None] & (o_output < N)[None, :]
    if p_base is not None:
        b_sum = tl.load(p_base + place, mask=m_tile, other=0.0).to(tl.float32)
    else:
        b_sum = tl.zeros([16, BN], tl.float32)
    p_left = left_of(p_input, o_row, M, K, BK)
    o_inner = tl.arange(0, BK)
    for first in range(0, R, BR):
        o_rank = first + tl.arange(0, BR)
        m_rank = o_rank < R
        b_outer = tl.load(
            p_outer + o_rank[:, None] * N + o_output[None, :], mask=m_rank[:, None] & (o_output < N)[None, :], other=0.0
        )
        p_right = right_of(p_inner, o_rank, R, BK)
        b_low = tl.zeros([16, BR], tl.float32)
        for begin in tl.range(0, K, BK, num_stages=STAGES):
            m_inner = o_inner < K - begin
            b_left = tl.load(p_left + begin, mask=m_inner[None, :], other=0.0)
            b_right = tl.load(p_right, mask=m_inner[:, None] & m_rank[None, :], other=0.0)
            p_right += BK * R
            b_low = tl.dot(b_left, b_right, b_low)
        b_sum = tl.dot(b_low.to(b_outer.dtype), b_outer, b_sum)
    store_block(p_output, b_sum, o_row, o_output, M, N)


@triton.jit(do_not_specialize=["M", "K", "R"])
def lower_kernel(p_input, p_inner, p_low, M, K, R, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                 STAGES: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """p_low [M, R] = p_input [M, K] p_inner [K, R]. Grid (ceil(M / BM) * ceil(R / BN))."""
    if ALIGNED:
        K, R = K // 8 * 8, R // 8 * 8  # which tells the compiler
    o_row, o_rank = block_of(tl.program_id(0), M, R, BM, BN, GROUP)
    gemm_block(p_input, p_inner, None, None, p_low, o_row, o_rank, M, R, K, BM, BN, BK, STAGES, False)


@triton.jit(do_not_specialize=["M", "N", "R"])
def raise_kernel(p_low, p_outer, p_base, p_output, M, N, R, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                 STAGES: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """p_output [M, N] = p_base [M, N] + p_low [M, R] p_outer [R, N]. Grid (ceil(M / BM) * ceil(N / BN))."""
    if ALIGNED:
        N, R = N // 8 * 8, R // 8 * 8  # which tells the compiler
    o_row, o_output = block_of(tl.program_id(0), M, N, BM, BN, GROUP)
    gemm_block(p_low, p_outer, None, p_base, p_output, o_row, o_output, M, N, R, BM, BN, BK, STAGES, False)


FUNCTIONS = {"low_rank": low_rank_kernel, "lower": lower_kernel, "raise": raise_kernel}
