"""Rows times a weight by matrix instructions with float32 sums, and the norm before it."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.gemm_plan import GROUP_ROWS, INNER

GROUP = tl.constexpr(GROUP_ROWS)
WHOLE_INNER = tl.constexpr(INNER)


@triton.jit
def scale_of_row(p_row, K, epsilon, BC: tl.constexpr):
    """One over the root mean square of a row of K numbers."""
    o_column = tl.arange(0, BC)
    b_squares = tl.zeros([BC], tl.float32)
    for begin in range(0, K, BC):
        b_x = tl.load(p_row + begin + o_column, mask=o_column < K - begin, other=0.0).to(tl.float32)
        b_squares += b_x * b_x
    return 1 / tl.sqrt(tl.sum(b_squares, 0) / K + epsilon)


@triton.jit(do_not_specialize=["K"])
def norm_kernel(p_input, p_norm_weight, p_rows, K, epsilon, BC: tl.constexpr):
    """Tokens p_input [M, K] over their root mean square, times p_norm_weight [K]. Grid (M)."""
    first = tl.program_id(0).to(tl.int64) * K
    o_column = tl.arange(0, BC)
    scale = scale_of_row(p_input + first, K, epsilon, BC)
    for begin in range(0, K, BC):
        m_column = o_column < K - begin
        b_x = tl.load(p_input + first + begin + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_weight = tl.load(p_norm_weight + begin + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_row = (b_x * scale * b_weight).to(p_rows.dtype.element_ty)
        tl.store(p_rows + first + begin + o_column, b_row, mask=m_column)


@triton.jit
def left_of(p_rows, o_row, M, K, BK: tl.constexpr):
    """The first BK numbers of the rows o_row [BM]; rows beyond the last are the last."""
    return p_rows + tl.minimum(o_row, M - 1).to(tl.int64)[:, None] * K + tl.arange(0, BK)[None, :]


@triton.jit
def right_of(p_weight, o_output, stride, BK: tl.constexpr):
    """Outputs o_output [BN] of the first BK inputs of a weight, whose rows of `stride` numbers are those of an input."""
    return p_weight + tl.arange(0, BK).to(tl.int64)[:, None] * stride + o_output[None, :]


@triton.jit
def store_block(p_output, b_value, o_row, o_output, M, N):
    """Rows and outputs that exist, [M, N]."""
    place = o_row.to(tl.int64)[:, None] * N + o_output[None, :]
    tl.store(
        p_output + place, b_value.to(p_output.dtype.element_ty), mask=(o_row < M)[:, None] & (o_output < N)[None, :]
    )


@triton.jit
def corner_of(at, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and output of program `at`: GROUP blocks of rows beside each other share what they read of the weight."""
    row_blocks, output_blocks = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = at // (GROUP * output_blocks)
    members = min(row_blocks - group * GROUP, GROUP)
    at -= group * (GROUP * output_blocks)
    return (group * GROUP + at % members) * BM, at // members * BN


@triton.jit
def block_of(at, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Rows and outputs of program `at`."""
    row, output = corner_of(at, M, N, BM, BN, GROUP)
    return row + tl.arange(0, BM), output + tl.arange(0, BN)


@triton.jit
def added_to(p_residual, b_sum, o_row, o_output, M, N):
    """b_sum plus p_residual [M, N] where there are such rows and outputs."""
    place = o_row.to(tl.int64)[:, None] * N + o_output[None, :]
    m_tile = (o_row < M)[:, None] & (o_output < N)[None, :]
    return b_sum + tl.load(p_residual + place, mask=m_tile, other=0.0).to(tl.float32)


@triton.jit
def store_sum(p_residual, p_output, b_sum, o_row, o_output, M, N):
    """Rows and outputs that exist, [M, N], plus those of p_residual where there is one."""
    if p_residual is not None:
        b_sum = added_to(p_residual, b_sum, o_row, o_output, M, N)
    store_block(p_output, b_sum, o_row, o_output, M, N)


@triton.jit
def gemm_block(p_rows, p_weight, p_turned_weight, p_residual, p_output, o_row, o_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, p_norm_weight=None, epsilon=0.0,
                  EXACT: tl.constexpr = False):  # fmt: skip
    """Outputs `o_output` [BN] of the rows `o_row` [BM]. WHOLE: K is a multiple of BK, so that none are masked. EXACT: float32 as it is."""
    p_left = left_of(p_rows, o_row, M, K, BK)
    o_inner = tl.arange(0, BK)
    m_output = (o_output < N)[None, :]
    if p_turned_weight is None:
        p_right = right_of(p_weight, o_output, N, BK)
    else:
        p_right = p_turned_weight + tl.minimum(o_output, N - 1).to(tl.int64)[:, None] * K + o_inner[None, :]
    if p_norm_weight is not None:
        b_scale = scales_of(p_left, o_row < M, K, epsilon, BM, BK)
    b_sum = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        m_inner = o_inner < (BK if WHOLE else K - begin)
        b_left = tl.load(p_left + begin, mask=m_inner[None, :], other=0.0)
        if p_norm_weight is not None:
            b_left = normed_block(b_left, p_norm_weight, b_scale, begin + o_inner, m_inner)
        if p_turned_weight is None:
            b_right = tl.load(p_right, mask=m_inner[:, None] & m_output, other=0.0)
            p_right += BK * N
            b_sum = tl.dot(b_left, b_right, b_sum)
        else:
            b_right = tl.load(p_right + begin, mask=m_inner[None, :], other=0.0)
            if EXACT:
                b_sum = tl.dot(b_left, tl.trans(b_right), b_sum, input_precision="tf32x3")
            else:
                b_sum = tl.dot(b_left, tl.trans(b_right), b_sum)
    store_sum(p_residual, p_output, b_sum, o_row, o_output, M, N)


@triton.jit
def scales_of(p_left, m_row, K, epsilon, BM: tl.constexpr, BK: tl.constexpr):
    """One over the root mean square of rows, float32 [BM]; p_left: their first BK numbers."""
    o_inner = tl.arange(0, BK)
    b_squares = tl.zeros([BM, BK], tl.float32)
    for begin in range(0, K, BK):
        b_x = tl.load(p_left + begin, mask=m_row[:, None] & (o_inner < K - begin)[None, :], other=0.0).to(tl.float32)
        b_squares += b_x * b_x
    return 1 / tl.sqrt(tl.sum(b_squares, 1) / K + epsilon)


@triton.jit
def normed_block(b_x, p_norm_weight, b_scale, o_inner, m_inner):
    """Numbers o_inner [BK] of rows behind the norm, in the type of the rows."""
    b_weight = tl.load(p_norm_weight + o_inner, mask=m_inner, other=0.0).to(tl.float32)
    return (b_x.to(tl.float32) * b_scale[:, None] * b_weight[None, :]).to(b_x.dtype)


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


@triton.jit
def copied_block(d_rows, d_weight, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 GROUP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Rows d_rows [M, K] times d_weight [K, N], plus p_residual [M, N] where there is one. Grid (ceil(M / BM) * ceil(N / BN))."""
    row, output = corner_of(tl.program_id(0), M, N, BM, BN, GROUP)
    b_sum = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        b_sum = tl.dot(d_rows.load([row, begin]), d_weight.load([begin, output]), b_sum)
    store_sum(p_residual, p_output, b_sum, row + tl.arange(0, BM), output + tl.arange(0, BN), M, N)
