"""Rows times a weight where rows are so few that time is that of reading the weight: programs share the inputs of an output, too, so that
all of the chip reads, and who is last sums their parts in order."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.dense_matmul.plan import GROUP_ROWS, INNER
from still_kernels.triton_shared import wait_for_the_one_ahead

GROUP = tl.constexpr(GROUP_ROWS)

WHOLE_INNER = tl.constexpr(INNER)
NORM_BLOCK = tl.constexpr(512)


@triton.jit
def scales_of(p_rows, o_row, M, K, epsilon):
    """One over the root mean square of rows o_row, float32 [16]. The product waits for it: few, wide blocks, and three under way."""
    o_inner = tl.arange(0, NORM_BLOCK)
    p_row = p_rows + o_row.to(tl.int64)[:, None] * K
    b_squares = tl.zeros([GROUP, NORM_BLOCK], tl.float32)
    for begin in tl.range(0, K, NORM_BLOCK, num_stages=4):
        o_begun = begin + o_inner
        b_x = tl.load(p_row + o_begun[None, :], mask=(o_row < M)[:, None] & (o_begun < K)[None, :], other=0.0).to(
            tl.float32
        )
        b_squares += b_x * b_x
    return 1 / tl.sqrt(tl.sum(b_squares, 1) / K + epsilon)


@triton.jit
def left_block(p_left, p_norm_weight, b_scale, m_row, o_inner, last, WHOLE: tl.constexpr):
    """Inputs o_inner [BK] of 16 rows, normed where there is p_norm_weight; zeros from `last` on. WHOLE: there are none."""
    m_left = m_row[:, None]
    if not WHOLE:
        m_left &= (o_inner < last)[None, :]
    b_left = tl.load(p_left, mask=m_left, other=0.0)
    if p_norm_weight is not None:
        b_weight = tl.load(p_norm_weight + o_inner, mask=o_inner < last, other=0.0).to(tl.float32)
        b_left = (b_left.to(tl.float32) * b_scale[:, None] * b_weight[None, :]).to(b_left.dtype)
    return b_left


@triton.jit
def right_block(p_right, m_output, m_inner, WHOLE: tl.constexpr):
    """Inputs and outputs of a weight that exist, zeros elsewhere; inputs are not asked where it is WHOLE."""
    m_right = m_output
    if not WHOLE:
        m_right &= m_inner
    return tl.load(p_right, mask=m_right, other=0.0)


@triton.jit
def few_block(p_rows, p_norm_weight, p_weight, p_turned_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, epsilon,
              BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Outputs of up to 16 rows. WHOLE: K is a multiple of `plan.INNER`. Grid (ceil(M / 16), ceil(N / BN), programs that share the inputs
    of an output)."""
    EVEN: tl.constexpr = WHOLE and WHOLE_INNER % BK == 0
    i_split, splits = tl.program_id(2), tl.num_programs(2)
    o_row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    share = tl.cdiv(tl.cdiv(K, BK), splits) * BK
    first = i_split * share
    last = tl.minimum(first + share, K)
    o_inner = first + tl.arange(0, BK)
    m_row, m_output = o_row < M, (o_output < N)[None, :]
    p_left = p_rows + o_row.to(tl.int64)[:, None] * K + o_inner[None, :]
    if p_turned_weight is None:
        p_right = p_weight + o_inner.to(tl.int64)[:, None] * N + o_output[None, :]
    else:
        p_right = p_turned_weight + tl.minimum(o_output, N - 1).to(tl.int64)[None, :] * K + o_inner[:, None]
    wait_for_the_one_ahead(PDL)
    b_scale = tl.zeros([GROUP], tl.float32)
    if p_norm_weight is not None:
        b_scale = scales_of(p_rows, o_row, M, K, epsilon)
    b_sum = tl.zeros([GROUP, BN], tl.float32)
    for begin in tl.range(0, last - first, BK, num_stages=STAGES):
        b_left = left_block(p_left, p_norm_weight, b_scale, m_row, o_inner + begin, last, EVEN)
        b_right = right_block(p_right, m_output, (o_inner + begin < last)[:, None], EVEN)
        b_sum = tl.dot(b_left, b_right, b_sum)
        p_left += BK
        p_right += BK if p_weight is None else BK * N
    place = o_row.to(tl.int64)[:, None] * N + o_output[None, :]
    m_tile = m_row[:, None] & m_output
    last_one = splits * 0 + 1
    if splits > 1:
        part = M.to(tl.int64) * N
        tl.store(p_partial + i_split * part + place, b_sum, mask=m_tile)
        tl.debug_barrier()
        p_arrived = p_arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        last_one = (tl.atomic_add(p_arrived, 1, sem="acq_rel") == splits - 1).to(tl.int32)
        if last_one > 0:
            b_sum = tl.zeros([GROUP, BN], tl.float32)
            for begin in range(0, splits, 4):
                for i in tl.static_range(4):  # four are asked for at a time
                    p_part = p_partial + (begin + i) * part + place
                    b_sum += tl.load(p_part, mask=m_tile & (begin + i < splits), other=0.0, cache_modifier=".cg")
            tl.store(p_arrived, 0)
    if last_one > 0:
        if p_residual is not None:
            b_sum += tl.load(p_residual + place, mask=m_tile, other=0.0).to(tl.float32)
        tl.store(p_output + place, b_sum.to(p_output.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["M", "N", "K"])
def few_kernel(p_input, p_norm_weight, p_weight, p_turned_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, epsilon,
               BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """p_input [M, K], normed where there is p_norm_weight [K], times p_weight [K, N] (p_turned_weight [N, K]), plus p_residual [M, N].
    Grid (ceil(M / 16), ceil(N / BN), S); p_partial float32 [S, M, N], p_arrivals zeros, one for each block."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    few_block(
        p_input, p_norm_weight, p_weight, p_turned_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, epsilon, BN, BK, STAGES,
        WHOLE, PDL,
    )  # fmt: skip
