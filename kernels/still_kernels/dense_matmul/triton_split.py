"""Rows times a weight where rows and outputs are so few that the chip would not be full: programs share the inputs of a block of outputs,
and who arrives last sums their parts, in their order."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.dense_matmul.plan import GROUP_ROWS, INNER
from still_kernels.dense_matmul.triton_products import store_sum

GROUP = tl.constexpr(GROUP_ROWS)
WHOLE_INNER = tl.constexpr(INNER)


@triton.jit
def split_block(p_rows, p_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, BN: tl.constexpr, BK: tl.constexpr,
                 STAGES: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Outputs of up to 16 rows. WHOLE: K is a multiple of WHOLE_INNER. Grid (ceil(M / 16), ceil(N / BN), S); p_partial float32 [S, M, N],
    p_arrivals zeros, one for each block."""
    i_split, splits = tl.program_id(2), tl.num_programs(2)
    o_row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    share = tl.cdiv(tl.cdiv(K, BK), splits) * BK
    first = i_split * share
    last = tl.minimum(first + share, K)
    o_inner = first + tl.arange(0, BK)
    m_row, m_output = (o_row < M)[:, None], (o_output < N)[None, :]  # a row that is not there would cost as much
    p_left = p_rows + o_row.to(tl.int64)[:, None] * K + o_inner[None, :]
    p_right = p_weight + o_inner.to(tl.int64)[:, None] * N + o_output[None, :]
    b_sum = tl.zeros([GROUP, BN], tl.float32)
    for begin in tl.range(0, last - first, BK, num_stages=STAGES):
        m_inner = tl.arange(0, BK) < (BK if WHOLE and BK <= WHOLE_INNER else last - first - begin)
        b_left = tl.load(p_left, mask=m_row & m_inner[None, :], other=0.0)
        b_right = tl.load(p_right, mask=m_inner[:, None] & m_output, other=0.0)
        b_sum = tl.dot(b_left, b_right, b_sum)
        p_left += BK
        p_right += BK * N
    place = o_row.to(tl.int64)[:, None] * N + o_output[None, :]
    m_tile = m_row & m_output
    part = M.to(tl.int64) * N
    tl.store(p_partial + i_split * part + place, b_sum, mask=m_tile)
    tl.debug_barrier()
    p_arrived = p_arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.atomic_add(p_arrived, 1, sem="acq_rel") == splits - 1:
        b_sum = tl.zeros([GROUP, BN], tl.float32)
        for begin in range(0, splits, 4):
            for i in tl.static_range(4):  # four are asked for at a time
                p_part = p_partial + (begin + i) * part + place
                b_sum += tl.load(p_part, mask=m_tile & (begin + i < splits), other=0.0, cache_modifier=".cg")
        tl.store(p_arrived, 0)
        store_sum(p_residual, p_output, b_sum, o_row, o_output, M, N)


@triton.jit(do_not_specialize=["M", "N", "K"])
def split_kernel(p_rows, p_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, BN: tl.constexpr, BK: tl.constexpr,
                  STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """p_rows [M, K] times p_weight [K, N], plus p_residual [M, N]. Grid, p_partial and p_arrivals as of split_block."""
    if ALIGNED:
        N, K = N // 8 * 8, K // 8 * 8  # which tells the compiler
    split_block(p_rows, p_weight, p_residual, p_output, p_partial, p_arrivals, M, N, K, BN, BK, STAGES, WHOLE)
