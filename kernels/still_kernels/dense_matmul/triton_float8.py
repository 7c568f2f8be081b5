"""Rows times an e4m3 weight: each row is rounded with its own scale, and matrix instructions multiply the codes.

These instructions sum with fewer bits than float32 on sm_90. Many rows accept that, as PyTorch's scaled products with fast sums do: over
14,336 inputs the error is 0.3%, while rounding the rows errs 3.7%. Few rows, whose time is that of reading the weight, add to float32 every
BK products.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_gemm import added_to, block_of, corner_of, scale_of_row, store_sum

MOST = tl.constexpr(448.0)
"""Largest e4m3 number."""


@triton.jit
def _row_part(p_row, p_norm_weight, o_column, K, scale):
    """Numbers o_column of a row in float32, behind the norm where there is one, rounded as activations are."""
    b_x = tl.load(p_row + o_column, mask=o_column < K, other=0.0)
    return _normed(b_x, p_norm_weight, o_column, K, scale)


@triton.jit
def _normed(b_x, p_norm_weight, o_column, K, scale):
    """The same of numbers that were read."""
    if p_norm_weight is not None:
        b_weight = tl.load(p_norm_weight + o_column, mask=o_column < K, other=0.0).to(tl.float32)
        b_x = (b_x.to(tl.float32) * scale * b_weight).to(b_x.dtype)
    return b_x.to(tl.float32)


@triton.jit
def _to_e4m3(b_x):
    """To nearest, halves to even. Conversions of sm_89 go by way of half precision, whose last bits they cut off: what they are given has
    the four bits of e4m3, or is a multiple of its least number."""
    power = (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_large = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 * 2^20, whose last place is an eighth of the power
    return ((b_x + b_large) - b_large).to(tl.float8e4nv)


@triton.jit
def _codes(b_x, row_scale):
    """Numbers over their scale in e4m3. The quotient is that of a division: a product with the reciprocal, and what that leaves."""
    divisor = tl.where(row_scale > 0, row_scale, 1.0)
    b_divisor = tl.zeros_like(b_x) + divisor
    b_share = tl.zeros_like(b_x) + tl.div_rn(1.0, divisor)
    b_part = b_x * b_share
    b_part = tl.fma(tl.fma(-b_part, b_divisor, b_x), b_share, b_part)
    return _to_e4m3(b_part).to(tl.int8, bitcast=True)


@triton.jit
def _round_whole(p_row, p_norm_weight, p_codes, p_row_scale, K, epsilon, BC: tl.constexpr):
    """A row of at most BC numbers, which is read once."""
    o_column = tl.arange(0, BC)
    b_x = tl.load(p_row + o_column, mask=o_column < K, other=0.0)
    scale = 1.0
    if p_norm_weight is not None:
        b_wide = b_x.to(tl.float32)
        scale = 1 / tl.sqrt(tl.sum(b_wide * b_wide, 0) / K + epsilon)
    b_x = _normed(b_x, p_norm_weight, o_column, K, scale)
    row_scale = tl.div_rn(tl.max(tl.abs(b_x), 0), MOST)
    tl.store(p_row_scale, row_scale)
    tl.store(p_codes + o_column, _codes(b_x, row_scale), mask=o_column < K)


@triton.jit(do_not_specialize=["K"])
def round8_kernel(p_input, p_norm_weight, p_rounded, p_row_scales, K, epsilon, BC: tl.constexpr):
    """Codes p_rounded [M, K] and scales p_row_scales [M] of p_input [M, K], normed where there is p_norm_weight [K]. Grid (M).

    A number that is none is a code that is none; the largest magnitude is that of the others.
    """
    K = K // 16 * 16  # which tells the compiler
    row = tl.program_id(0)
    p_row = p_input + row.to(tl.int64) * K
    p_codes = p_rounded + row.to(tl.int64) * K
    p_row_scale = p_row_scales + row
    if K <= BC:
        _round_whole(p_row, p_norm_weight, p_codes, p_row_scale, K, epsilon, BC)
    else:
        o_column = tl.arange(0, BC)
        scale = 1.0
        if p_norm_weight is not None:
            scale = scale_of_row(p_row, K, epsilon, BC)
        b_most = tl.zeros([BC], tl.float32)
        for begin in range(0, K, BC):
            b_most = tl.maximum(b_most, tl.abs(_row_part(p_row, p_norm_weight, begin + o_column, K, scale)))
        row_scale = tl.div_rn(tl.max(b_most, 0), MOST)
        tl.store(p_row_scale, row_scale)
        for begin in range(0, K, BC):
            b_x = _row_part(p_row, p_norm_weight, begin + o_column, K, scale)
            tl.store(p_codes + begin + o_column, _codes(b_x, row_scale), mask=o_column < K - begin)


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
        b_sum += tl.dot(b_left, tl.trans(b_right)) * b_scale
    elif SWAPPED:
        b_sum = tl.dot(b_left, tl.trans(b_right), b_sum, max_num_imprecise_acc=BK)
    else:
        b_sum = tl.dot(b_left, tl.trans(b_right), b_sum)
    return b_sum


@triton.jit
def _scaled(p_row_scales, p_scales, b_sum, o_row, o_output, M, N, BLOCKED: tl.constexpr):
    """Sums [BM, BN] times the scales of their rows and, where those of blocks are not yet in them, of outputs."""
    b_sum *= tl.load(p_row_scales + o_row, mask=o_row < M, other=0.0)[:, None]
    if not BLOCKED:
        b_sum *= tl.load(p_scales + o_output, mask=o_output < N, other=0.0)[None, :]
    return b_sum


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
    b_sum = _scaled(p_row_scales, p_scales, tl.trans(b_sum), o_row, o_output, M, N, BLOCKED)
    store_sum(p_residual, p_output, b_sum, o_row, o_output, M, N)


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
    b_sum = _scaled(p_row_scales, p_scales, b_sum, o_row, o_output, M, N, BLOCKED)
    store_sum(p_residual, p_output, b_sum, o_row, o_output, M, N)


@triton.jit
def _copied_block(d_rounded, d_codes, p_row_scales, p_scales, row, output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  STAGES: tl.constexpr, BLOCKED: tl.constexpr):  # fmt: skip
    """Products of the rows from `row` on and the outputs from `output` on, of matrices that are copied by TMA."""
    o_row, o_output = row + tl.arange(0, BM), output + tl.arange(0, BN)
    p_scale = p_scales + tl.minimum(o_output, N - 1)
    b_sum = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        b_left, b_right = d_rounded.load([row, begin]), d_codes.load([output, begin])
        b_sum = _added(b_sum, b_left, b_right, p_scale + begin // BK * N, BK, BLOCKED, False)
    return _scaled(p_row_scales, p_scales, b_sum, o_row, o_output, M, N, BLOCKED)


@triton.jit(do_not_specialize=["M", "N", "K"])
def some8_tma_kernel(d_rounded, d_codes, p_row_scales, p_scales, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                     BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, BLOCKED: tl.constexpr):  # fmt: skip
    """As many8_kernel, with copies by TMA."""
    N = N // 8 * 8  # which tells the compiler
    row, output = corner_of(tl.program_id(0), M, N, BM, BN, GROUP)
    b_sum = _copied_block(d_rounded, d_codes, p_row_scales, p_scales, row, output, M, N, K, BM, BN, BK, STAGES, BLOCKED)
    store_sum(p_residual, p_output, b_sum, row + tl.arange(0, BM), output + tl.arange(0, BN), M, N)


@triton.jit
def _store_part(d_output, p_residual, b_sum, row, output, M, N):
    """Sums of the rows from `row` on and the outputs from `output` on, plus the residual where there is one."""
    if p_residual is not None:
        o_row, o_output = row + tl.arange(0, b_sum.shape[0]), output + tl.arange(0, b_sum.shape[1])
        b_sum = added_to(p_residual, b_sum, o_row, o_output, M, N)
    d_output.store([row, output], b_sum.to(d_output.dtype))


@triton.jit(do_not_specialize=["M", "N", "K"])
def many8_tma_kernel(d_rounded, d_codes, d_output, p_row_scales, p_scales, p_residual, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                     BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, STORE: tl.constexpr, BLOCKED: tl.constexpr):  # fmt: skip
    """The same by any number of programs, which share the blocks: while one is stored the next one's codes are on their way.

    STORE: Outputs that are stored at a time, all of a block or half of them.
    """
    N = N // 8 * 8  # which tells the compiler
    blocks = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for at in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        row, output = corner_of(at, M, N, BM, BN, GROUP)
        b_sum = _copied_block(
            d_rounded, d_codes, p_row_scales, p_scales, row, output, M, N, K, BM, BN, BK, STAGES, BLOCKED
        )
        if BN > STORE:
            b_low, b_high = tl.split(tl.permute(tl.reshape(b_sum, [BM, 2, STORE]), (0, 2, 1)))
            _store_part(d_output, p_residual, b_low, row, output, M, N)
            _store_part(d_output, p_residual, b_high, row, output + STORE, M, N)
        else:
            _store_part(d_output, p_residual, b_sum, row, output, M, N)


FUNCTIONS = {
    "round8": round8_kernel,
    "round8_short": round8_kernel,
    "few8": few8_kernel,
    "some8": many8_kernel,
    "some8_tma": some8_tma_kernel,
    "many8": many8_kernel,
    "many8_tma": many8_tma_kernel,
}
