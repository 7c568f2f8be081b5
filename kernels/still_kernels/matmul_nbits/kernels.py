"""Many rows times a weight in blocks: the weight is written in half precision, part by part, then a GEMM reads it."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.matmul_nbits.gluon_few import few_kernel


@triton.jit(do_not_specialize=["first", "count", "K", "ZW"])
def unpack_kernel(
    p_blocks, p_scales, p_zero_points, p_offsets, p_dense,
    first, count, K, ZW,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Outputs first .. first + count - 1 of a weight, [count, K]. Grid (ceil(K * BITS / 32 / BW), ceil(count / BN)).

    p_blocks, p_scales, p_zero_points, p_offsets: As `gluon_few.few_kernel` has them.
    """
    CODES: tl.constexpr = 32 // BITS
    K = K // 32 * 32  # which tells the compiler
    words = K // CODES
    o_word = tl.program_id(0) * BW + tl.arange(0, BW)
    o_row = tl.program_id(1) * BN + tl.arange(0, BN)
    m_tile = (o_row < count)[:, None] & (o_word < words)[None, :]
    row = (first + o_row).to(tl.int64)[:, None]
    block = (o_word * CODES // BLOCK)[None, :]
    b_word = tl.load(p_blocks + row * words + o_word[None, :], mask=m_tile, other=0)
    b_scale = tl.load(p_scales + row * (K // BLOCK) + block, mask=m_tile, other=0.0).to(tl.float32)
    if p_zero_points is None:
        b_zero = tl.full([BN, BW], 1 << (BITS - 1), tl.int32)
    else:
        b_zero = tl.load(p_zero_points + row * ZW + block // CODES, mask=m_tile, other=0)
        b_zero = (b_zero >> (block % CODES * BITS)) & ((1 << BITS) - 1)
    b_code = (b_word[:, :, None] >> (tl.arange(0, CODES) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    b_value = (b_code - b_zero[:, :, None]).to(tl.float32) * b_scale[:, :, None]
    if p_offsets is not None:
        b_offset = tl.load(p_offsets + row * (K // BLOCK) + block, mask=m_tile, other=0.0).to(tl.float32)
        b_value += b_offset[:, :, None]
    b_value = tl.reshape(b_value.to(p_dense.dtype.element_ty), [BN, BW * CODES])
    o_column = tl.program_id(0) * (BW * CODES) + tl.arange(0, BW * CODES)
    p_tile = p_dense + o_row.to(tl.int64)[:, None] * K + o_column[None, :]
    tl.store(p_tile, b_value, mask=(o_row < count)[:, None] & (o_column < K)[None, :])


@triton.jit(do_not_specialize=["first", "count", "M", "N", "K"])
def multiply_kernel(
    p_input, p_dense, p_output,
    first, count, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Outputs first .. first + count - 1 of p_input [M, K] times p_dense [count, K]. Grid (ceil(M / BM) * ceil(count / BN)).

    GROUP blocks of rows beside each other share what they read of the weight.
    """
    K = K // 32 * 32  # which tells the compiler
    if ALIGNED:
        N = N // 8 * 8
        first, count = first // 8 * 8, count // 8 * 8
    at = tl.program_id(0)
    row_blocks, output_blocks = tl.cdiv(M, BM), tl.cdiv(count, BN)
    group = at // (GROUP * output_blocks)
    members = min(row_blocks - group * GROUP, GROUP)
    at -= group * (GROUP * output_blocks)
    o_row = (group * GROUP + at % members) * BM + tl.arange(0, BM)
    o_output = at // members * BN + tl.arange(0, BN)
    o_inner = tl.arange(0, BK)
    p_left = p_input + tl.minimum(o_row, M - 1).to(tl.int64)[:, None] * K + o_inner[None, :]
    p_right = p_dense + tl.minimum(o_output, count - 1).to(tl.int64)[:, None] * K + o_inner[None, :]
    b_sum = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        m_inner = (o_inner < K - begin)[None, :]
        b_left = tl.load(p_left + begin, mask=m_inner, other=0.0)
        b_right = tl.load(p_right + begin, mask=m_inner, other=0.0)
        b_sum = tl.dot(b_left, tl.trans(b_right), b_sum)
    p_tile = p_output + o_row.to(tl.int64)[:, None] * N + (first + o_output)[None, :]
    m_tile = (o_row < M)[:, None] & (o_output < count)[None, :]
    tl.store(p_tile, b_sum.to(p_output.dtype.element_ty), mask=m_tile)


FUNCTIONS = {"few": few_kernel, "unpack": unpack_kernel, "multiply": multiply_kernel}
