"""Each token times its chosen matrices. Few tokens: a program computes some outputs of one (token, matrix) pair. Many tokens: the device
sorts pairs by matrix, and a program computes a block of them. Nothing is read back from the device."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.gluon_codes import registers, times, unpacking, zeroing
from still_kernels.common.triton_gemm import store_block
from still_kernels.common.triton_pairs import count_kernel, matrix_of, offsets_kernel, sort_kernel
from still_kernels.common.triton_shared import floats_of


@triton.jit
def _weights(p_weight, p_scales, p_zero_points, o_row, m_row, begin, K, ROWS: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Numbers begin .. begin + BK - 1 of rows o_row [ROWS] of matrices with K columns: of the weight's type, of codes float32."""
    if BITS == 0:
        o_inner = begin + tl.arange(0, BK)
        m_tile = m_row[:, None] & (o_inner < K)[None, :]
        b_weight = tl.load(p_weight + o_row[:, None] * K + o_inner[None, :], mask=m_tile, other=0.0)
    else:
        CODES: tl.constexpr = 32 // BITS
        MOST: tl.constexpr = (1 << BITS) - 1
        words, blocks = K // CODES, K // BLOCK
        o_word = begin // CODES + tl.arange(0, BK // CODES)
        m_tile = m_row[:, None] & (o_word < words)[None, :]
        b_word = tl.load(p_weight + o_row[:, None] * words + o_word[None, :], mask=m_tile, other=0)
        o_block = (o_word * CODES // BLOCK)[None, :]
        b_scale = tl.load(p_scales + o_row[:, None] * blocks + o_block, mask=m_tile, other=0.0).to(tl.float32)
        b_code = (b_word[:, :, None] >> (tl.arange(0, CODES) * BITS)[None, None, :]) & MOST
        if p_zero_points is None:
            b_code -= 1 << (BITS - 1)
        else:
            p_zero = p_zero_points + o_row[:, None] * tl.cdiv(blocks, CODES) + o_block // CODES
            b_zero = tl.load(p_zero, mask=m_tile, other=0) >> (o_block % CODES * BITS)
            b_code -= (b_zero & MOST)[:, :, None]
        b_weight = tl.reshape(floats_of(b_code) * b_scale[:, :, None], [ROWS, BK])
    return b_weight


@triton.jit
def _read_blocks(p_scales, p_zero_points, o_row, begin, K, BK: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Scales, and zero points as `zeros_of` has them, of parts of BLOCK numbers, begin .. begin + BK - 1 of rows o_row of matrices with K
    columns."""
    CODES: tl.constexpr = 32 // BITS
    PART: tl.constexpr = min(BLOCK, BK)
    o_block = ((begin + tl.arange(0, BK // PART) * PART) // BLOCK)[None, :]
    blocks = K // BLOCK
    m_block = o_block < blocks
    b_scale = tl.load(p_scales + o_row[:, None] * blocks + o_block, mask=m_block, other=0.0)
    if p_zero_points is None:
        b_word = tl.zeros_like(o_block) + (1 << (BITS - 1))
        b_shift = o_block * 0
    else:
        p_zero = p_zero_points + o_row[:, None] * tl.cdiv(blocks, CODES) + o_block // CODES
        b_word = tl.load(p_zero, mask=m_block, other=0)
        b_shift = o_block % CODES * BITS
    return b_scale, b_word >> b_shift


@triton.jit
def _spread(b_part, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """A value of each part [ROWS, parts] at each of its words [ROWS, WORDS]."""
    PARTS: tl.constexpr = b_part.shape[1]
    return tl.reshape(tl.broadcast_to(b_part[:, :, None], [ROWS, PARTS, WORDS // PARTS]), [ROWS, WORDS])


@triton.jit
def _unpacked(b_word, b_scale, b_zero, ROWS: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Numbers [ROWS, WORDS * 32 / BITS] of words, the scales' type (16 bits), by packed arithmetic (`gluon_codes`)."""
    KIND: tl.constexpr = b_scale.dtype
    BRAIN: tl.constexpr = KIND == tl.bfloat16
    b_scale = tl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $1};", "=r,h", [b_scale.to(tl.int16, bitcast=True)], dtype=tl.int32, is_pure=True, pack=1
    )
    b_zero = tl.inline_asm_elementwise(
        zeroing(BITS, BRAIN), "=r,r,r", [b_zero, b_zero * 0], dtype=tl.int32, is_pure=True, pack=1
    )
    b_scale, b_zero = _spread(b_scale, ROWS, WORDS), _spread(b_zero, ROWS, WORDS)
    TEXT: tl.constexpr = unpacking(BITS, BRAIN, False)
    REGISTERS: tl.constexpr = registers(BITS, False)
    operands = [b_word, b_zero, b_scale]
    if BITS == 4:
        e0, e1, e2, e3, e4, e5, e6, e7 = tl.inline_asm_elementwise(
            TEXT, REGISTERS, operands, dtype=times(KIND, 8), is_pure=True, pack=1
        )
        even, odd = tl.join(tl.join(e0, e4), tl.join(e2, e6)), tl.join(tl.join(e1, e5), tl.join(e3, e7))
        b_number = tl.join(even, odd)
    else:
        e0, e1, e2, e3 = tl.inline_asm_elementwise(
            TEXT, REGISTERS, operands, dtype=times(KIND, 4), is_pure=True, pack=1
        )
        b_number = tl.join(tl.join(e0, e2), tl.join(e1, e3))
    return tl.reshape(b_number, [ROWS, WORDS * 32 // BITS])


@triton.jit
def _activated(b_sum, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """silu(gate) * up of columns that take turns [ROWS, COLUMNS], or relu(up)^2."""
    if GATED:
        b_gate, b_up = tl.split(tl.reshape(b_sum, [ROWS, COLUMNS // 2, 2]))
        b_middle = b_gate / (1 + tl.exp(-b_gate)) * b_up
    else:
        b_up = tl.maximum(b_sum, 0.0)
        b_middle = b_up * b_up
    return b_middle


@triton.jit(do_not_specialize=["C", "E", "N", "M", "R"])
def few_gate_up_kernel(p_input, p_expert, p_gate_up, p_gate_up_scales, p_gate_up_zero_points, p_middle, C, E, N, M, R,
                       BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, ALIGNED: tl.constexpr,
                       BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """p_middle [tokens * C, M] of p_input [tokens, N] and p_gate_up [E, R, N]. Grid (ceil(R / BN), C, tokens)."""
    if ALIGNED:
        N = N // 32 * 32  # which tells the compiler
    token = tl.program_id(2).to(tl.int64)
    pair = token * C + tl.program_id(1)
    expert = matrix_of(p_expert, pair, True, E).to(tl.int64)
    o_row = tl.program_id(0) * BN + tl.arange(0, BN)
    b_sum = tl.zeros([BN, BK], tl.float32)
    for begin in tl.range(0, N, BK, num_stages=STAGES):
        o_inner = begin + tl.arange(0, BK)
        b_input = tl.load(p_input + token * N + o_inner, mask=o_inner < N, other=0.0).to(tl.float32)
        b_weight = _weights(
            p_gate_up, p_gate_up_scales, p_gate_up_zero_points, expert * R + o_row, o_row < R, begin, N, BN, BK, BITS, BLOCK
        )  # fmt: skip
        b_sum += b_weight.to(tl.float32) * b_input[None, :]
    OUTPUTS: tl.constexpr = BN // 2 if GATED else BN
    b_middle = tl.reshape(_activated(tl.sum(b_sum, 1)[None, :], 1, BN, GATED), [OUTPUTS])
    o_middle = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(p_middle + pair * M + o_middle, b_middle.to(p_middle.dtype.element_ty), mask=o_middle < M)


@triton.jit(do_not_specialize=["C", "E", "N", "M"])
def few_down_kernel(p_expert, p_weight, p_middle, p_down, p_down_scales, p_down_zero_points, p_output, C, E, N, M, BN: tl.constexpr,
                    BK: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """p_output [tokens, N] of p_middle and p_down [E, N, M], times p_weight [tokens, C]. Grid (ceil(N / BN), tokens)."""
    if ALIGNED:
        M = M // 32 * 32  # which tells the compiler
    token = tl.program_id(1).to(tl.int64)
    o_row = tl.program_id(0) * BN + tl.arange(0, BN)
    blocks = tl.cdiv(M, BK)
    b_sum = tl.zeros([BN, BK], tl.float32)
    for at in tl.range(0, C * blocks, num_stages=STAGES):
        pair, begin = token * C + at // blocks, at % blocks * BK
        expert = matrix_of(p_expert, pair, True, E).to(tl.int64)
        o_inner = begin + tl.arange(0, BK)
        b_middle = tl.load(p_middle + pair * M + o_inner, mask=o_inner < M, other=0.0).to(tl.float32)
        b_weight = _weights(
            p_down, p_down_scales, p_down_zero_points, expert * N + o_row, o_row < N, begin, M, BN, BK, BITS, BLOCK
        )  # fmt: skip
        b_sum += b_weight.to(tl.float32) * (b_middle * tl.load(p_weight + pair))[None, :]
    b_output = tl.sum(b_sum, 1).to(p_output.dtype.element_ty)
    tl.store(p_output + token * N + o_row, b_output, mask=o_row < N)


@triton.jit
def _block_sum(p_left, p_weight, p_scales, p_zero_points, first, o_row, m_row, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               STAGES: tl.constexpr, DOT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rows that begin at p_left [BM] times rows first + o_row [BN] of matrices, [BM, BN]."""
    if BITS == 0:
        p_weight += first * K
    else:
        p_weight += first * (K // (32 // BITS))
        p_scales += first * (K // BLOCK)
        if p_zero_points is not None:
            p_zero_points += first * tl.cdiv(K // BLOCK, 32 // BITS)
    PACKED: tl.constexpr = BITS > 0 and p_left.dtype.element_ty != tl.float32
    b_sum = tl.zeros([BM, BN], tl.float32)
    p_left = p_left[:, None] + tl.arange(0, BK)[None, :]
    if PACKED:
        WORDS: tl.constexpr = BK * BITS // 32
        words = K // (32 // BITS)
        o_row = tl.where(m_row, o_row, 0)
        p_word = p_weight + o_row[:, None] * words + tl.arange(0, WORDS)[None, :]
        b_scale, b_zero = _read_blocks(p_scales, p_zero_points, o_row, 0, K, BK, BITS, BLOCK)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        b_left = tl.load(p_left + begin, mask=(tl.arange(0, BK) < K - begin)[None, :], other=0.0)
        if PACKED:  # what blocks have is asked for a turn ahead, as no copy in the background takes two bytes
            at = begin // (32 // BITS)
            b_word = tl.load(p_word + at, mask=(tl.arange(0, WORDS) < words - at)[None, :], other=0)
            next_scale, next_zero = _read_blocks(p_scales, p_zero_points, o_row, begin + BK, K, BK, BITS, BLOCK)
            b_right = _unpacked(b_word, b_scale, b_zero, BN, WORDS, BITS)
            b_scale, b_zero = next_scale, next_zero
        else:
            b_right = _weights(p_weight, p_scales, p_zero_points, o_row, m_row, begin, K, BN, BK, BITS, BLOCK)
        b_sum = tl.dot(b_left, tl.trans(b_right.to(b_left.dtype)), b_sum, input_precision=DOT)
    return b_sum


@triton.jit(do_not_specialize=["C", "N", "M", "R"])
def gate_up_kernel(p_input, p_order, p_blocks, p_gate_up, p_gate_up_scales, p_gate_up_zero_points, p_middle, C, N, M, R,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr,
                   ALIGNED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """p_middle [P, M] of sorted pairs, of p_input [P / C, N]. Grid (NB * ceil(R / BN))."""
    if ALIGNED:
        N = N // 32 * 32  # which tells the compiler
    outputs = tl.cdiv(R, BN)
    p_block = p_blocks + tl.program_id(0) // outputs * 3
    expert, start, stop = tl.load(p_block).to(tl.int64), tl.load(p_block + 1), tl.load(p_block + 2)
    if start < stop:
        o_place = start + tl.arange(0, BM)
        b_token = tl.load(p_order + o_place, mask=o_place < stop, other=0) // C
        output = tl.program_id(0) % outputs * BN
        o_row = output + tl.arange(0, BN)
        b_sum = _block_sum(p_input + b_token.to(tl.int64) * N, p_gate_up, p_gate_up_scales, p_gate_up_zero_points, expert * R, o_row,
                           o_row < R, N, BM, BN, BK, STAGES, DOT, BITS, BLOCK)  # fmt: skip
        OUTPUTS: tl.constexpr = BN // 2 if GATED else BN
        o_output = output // BN * OUTPUTS + tl.arange(0, OUTPUTS)
        store_block(p_middle, _activated(b_sum, BM, BN, GATED), o_place, o_output, stop, M)


@triton.jit(do_not_specialize=["N", "M"])
def down_kernel(p_weight, p_order, p_blocks, p_middle, p_down, p_down_scales, p_down_zero_points, p_parts, N, M, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """p_parts [P, N] of pairs in their own order, times p_weight [P]. Grid (NB * ceil(N / BN))."""
    if ALIGNED:
        N, M = N // 32 * 32, M // 32 * 32  # which tells the compiler
    outputs = tl.cdiv(N, BN)
    p_block = p_blocks + tl.program_id(0) // outputs * 3
    expert, start, stop = tl.load(p_block).to(tl.int64), tl.load(p_block + 1), tl.load(p_block + 2)
    if start < stop:
        o_place = start + tl.arange(0, BM)
        m_place = o_place < stop
        o_row = tl.program_id(0) % outputs * BN + tl.arange(0, BN)
        p_left = p_middle + tl.minimum(o_place, stop - 1).to(tl.int64) * M
        b_sum = _block_sum(p_left, p_down, p_down_scales, p_down_zero_points, expert * N, o_row, o_row < N, M, BM, BN, BK, STAGES, DOT,
                           BITS, BLOCK)  # fmt: skip
        b_pair = tl.load(p_order + o_place, mask=m_place, other=0)
        b_sum *= tl.load(p_weight + b_pair, mask=m_place, other=0.0)[:, None]
        p_part = p_parts + b_pair.to(tl.int64)[:, None] * N + o_row[None, :]
        tl.store(p_part, b_sum.to(p_parts.dtype.element_ty), mask=m_place[:, None] & (o_row < N)[None, :])


@triton.jit(do_not_specialize=["C", "N"])
def add_kernel(p_parts, p_output, C, N, BC: tl.constexpr, ALIGNED: tl.constexpr):
    """p_output [tokens, N], the parts of each token summed in their order. Grid (tokens, ceil(N / BC))."""
    if ALIGNED:
        N = N // 32 * 32  # which tells the compiler
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BC + tl.arange(0, BC)
    m_column = o_column < N
    b_sum = tl.zeros([BC], tl.float32)
    for pair in range(0, C):
        b_sum += tl.load(p_parts + (token * C + pair) * N + o_column, mask=m_column, other=0.0).to(tl.float32)
    tl.store(p_output + token * N + o_column, b_sum.to(p_output.dtype.element_ty), mask=m_column)


FUNCTIONS = {
    "few_gate_up": few_gate_up_kernel,
    "few_down": few_down_kernel,
    "count": count_kernel,
    "offsets": offsets_kernel,
    "sort": sort_kernel,
    "some_gate_up": gate_up_kernel,
    "some_down": down_kernel,
    "many_gate_up": gate_up_kernel,
    "many_down": down_kernel,
    "add": add_kernel,
}
