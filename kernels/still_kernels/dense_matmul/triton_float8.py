"""Rows times a weight in e4m3: each row is rounded with a scale of its own, and matrix instructions multiply the codes.

Sums of such instructions have fewer bits than float32 on sm_90, so those of BK products are added to float32 outside of them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_gemm import block_of, corner_of, store_sum

MOST = tl.constexpr(448.0)
"""The largest number of e4m3."""


@triton.jit
def _row_part(p_row, p_norm_weight, o_column, K, scale):
    """Numbers o_column of a row in float32, behind the norm where there is one, rounded as activations are."""
    m_column = o_column < K
    b_x = tl.load(p_row + o_column, mask=m_column, other=0.0)
    if p_norm_weight is not None:
        b_weight = tl.load(p_norm_weight + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_x = (b_x.to(tl.float32) * scale * b_weight).to(b_x.dtype)
    return b_x.to(tl.float32)


@triton.jit
def _to_e4m3(b_x):
    """To nearest, halves to even. Conversions of sm_89 go by way of half precision, whose last bits they cut off: what they are given has
    the four bits of e4m3, or is a multiple of its least number."""
    power = (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_large = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 * 2^20, whose last place is an eighth of the power
    return ((b_x + b_large) - b_large).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["K"])
def round8_kernel(p_input, p_norm_weight, p_rounded, p_row_scales, K, epsilon, BC: tl.constexpr):
    """Codes p_rounded [M, K] and scales p_row_scales [M] of p_input [M, K], normed where there is p_norm_weight [K]. Grid (M).

    A number that is none is a code that is none; the largest magnitude is that of the others.
    """
    row = tl.program_id(0)
    p_row = p_input + row.to(tl.int64) * K
    o_column = tl.arange(0, BC)
    scale = 1.0
    if p_norm_weight is not None:
        b_squares = tl.zeros([BC], tl.float32)
        for begin in range(0, K, BC):
            b_x = tl.load(p_row + begin + o_column, mask=o_column < K - begin, other=0.0).to(tl.float32)
            b_squares += b_x * b_x
        scale = 1 / tl.sqrt(tl.sum(b_squares, 0) / K + epsilon)
    b_most = tl.zeros([BC], tl.float32)
    for begin in range(0, K, BC):
        b_most = tl.maximum(b_most, tl.abs(_row_part(p_row, p_norm_weight, begin + o_column, K, scale)))
    row_scale = tl.div_rn(tl.max(b_most, 0), MOST)
    tl.store(p_row_scales + row, row_scale)
    divisor = tl.where(row_scale > 0, row_scale, 1.0)
    p_codes = p_rounded + row.to(tl.int64) * K
    for begin in range(0, K, BC):
        b_x = _row_part(p_row, p_norm_weight, begin + o_column, K, scale)
        b_code = _to_e4m3(tl.div_rn(b_x, tl.full([BC], 1.0, tl.float32) * divisor))
        tl.store(p_codes + begin + o_column, b_code.to(tl.int8, bitcast=True), mask=o_column < K - begin)


@triton.jit
def _numbers_of(p_codes, o_row, M, K, BK: tl.constexpr):
    """The first BK codes of the rows o_row; rows beyond the last are the last."""
    p_first = p_codes.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return p_first + tl.minimum(o_row, M - 1).to(tl.int64)[:, None] * K + tl.arange(0, BK)[None, :]


@triton.jit
def _added(b_sum, b_left, b_right, p_scale, BK: tl.constexpr, BLOCKED: tl.constexpr, SWAPPED: tl.constexpr):
    """b_sum plus the product of both, where it is BLOCKED times the scales p_scale [BN] of the outputs."""
    if BLOCKED:
        b_scale = tl.load(p_scale)
        b_scale = b_scale[:, None] if SWAPPED else b_scale[None, :]
        b_sum += tl.dot(b_left, tl.trans(b_right), max_num_imprecise_acc=BK) * b_scale
    else:
        b_sum = tl.dot(b_left, tl.trans(b_right), b_sum, max_num_imprecise_acc=BK)
    return b_sum


@triton.jit
def _store(p_row_scales, p_scales, p_residual, p_output, b_sum, o_row, o_output, M, N, BLOCKED: tl.constexpr):
    """Sums [BM, BN] times the scales of their rows and, where those of blocks are not yet in them, of outputs, plus the residual."""
    b_sum *= tl.load(p_row_scales + o_row, mask=o_row < M, other=0.0)[:, None]
    if not BLOCKED:
        b_sum *= tl.load(p_scales + o_output, mask=o_output < N, other=0.0)[None, :]
    store_sum(p_residual, p_output, b_sum, o_row, o_output, M, N)


@triton.jit
def _block(p_rounded, p_codes, p_scales, o_row, o_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           STAGES: tl.constexpr, WHOLE: tl.constexpr, BLOCKED: tl.constexpr, SWAPPED: tl.constexpr):  # fmt: skip
    """Sums of outputs o_output [BN] of the rows o_row [BM]; SWAPPED: [BN, BM], as matrix instructions want few rows."""
    p_left, p_right = _numbers_of(p_rounded, o_row, M, K, BK), _numbers_of(p_codes, o_output, N, K, BK)
    if SWAPPED:
        p_left, p_right = p_right, p_left
    b_sum = tl.zeros([BN, BM] if SWAPPED else [BM, BN], tl.float32)
    o_inner = tl.arange(0, BK)
    p_scale = p_scales + tl.minimum(o_output, N - 1)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        if WHOLE:
            b_left, b_right = tl.load(p_left + begin), tl.load(p_right + begin)
        else:
            m_inner = (o_inner < K - begin)[None, :]
            b_left = tl.load(p_left + begin, mask=m_inner, other=0.0)
            b_right = tl.load(p_right + begin, mask=m_inner, other=0.0)
        b_sum = _added(b_sum, b_left, b_right, p_scale + begin // BK * N, BK, BLOCKED, SWAPPED)
    return b_sum


@triton.jit(do_not_specialize=["M", "N", "K"])
def few8_kernel(p_rounded, p_row_scales, p_codes, p_scales, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, BLOCKED: tl.constexpr):  # fmt: skip
    """Codes p_rounded [M, K] and their scales [M] times p_codes [N, K] and theirs, [1, N] or of each BK inputs [K / BK, N], plus p_residual
    [M, N]. Grid (ceil(M / BM), ceil(N / BN))."""
    K = K // 16 * 16  # which tells the compiler
    if ALIGNED:
        N = N // 8 * 8
    o_row = tl.program_id(0) * BM + tl.arange(0, BM)
    o_output = tl.program_id(1) * BN + tl.arange(0, BN)
    b_sum = _block(p_rounded, p_codes, p_scales, o_row, o_output, M, N, K, BM, BN, BK, STAGES, WHOLE, BLOCKED, True)
    _store(p_row_scales, p_scales, p_residual, p_output, tl.trans(b_sum), o_row, o_output, M, N, BLOCKED)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many8_kernel(p_rounded, p_row_scales, p_codes, p_scales, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
                 BLOCKED: tl.constexpr):  # fmt: skip
    """The same for many rows. Grid (ceil(M / BM) * ceil(N / BN))."""
    K = K // 16 * 16  # which tells the compiler
    if ALIGNED:
        N = N // 8 * 8
    o_row, o_output = block_of(tl.program_id(0), M, N, BM, BN, GROUP)
    b_sum = _block(p_rounded, p_codes, p_scales, o_row, o_output, M, N, K, BM, BN, BK, STAGES, WHOLE, BLOCKED, False)
    _store(p_row_scales, p_scales, p_residual, p_output, b_sum, o_row, o_output, M, N, BLOCKED)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many8_tma_kernel(d_rounded, d_codes, p_row_scales, p_scales, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                     BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, BLOCKED: tl.constexpr):  # fmt: skip
    """The same with matrices that are copied by TMA."""
    N = N // 8 * 8  # which tells the compiler
    row, output = corner_of(tl.program_id(0), M, N, BM, BN, GROUP)
    o_row, o_output = row + tl.arange(0, BM), output + tl.arange(0, BN)
    p_scale = p_scales + tl.minimum(o_output, N - 1)
    b_sum = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        b_left, b_right = d_rounded.load([row, begin]), d_codes.load([output, begin])
        b_sum = _added(b_sum, b_left, b_right, p_scale + begin // BK * N, BK, BLOCKED, False)
    _store(p_row_scales, p_scales, p_residual, p_output, b_sum, o_row, o_output, M, N, BLOCKED)


FUNCTIONS = {
    "round8": round8_kernel,
    "few8": few8_kernel,
    "some8": many8_kernel,
    "some8_tma": many8_tma_kernel,
    "many8": many8_kernel,
    "many8_tma": many8_tma_kernel,
}
