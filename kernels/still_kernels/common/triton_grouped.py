"""Each token times the matrices that it goes to. A few tokens: a program has some outputs of one pair of token and matrix. Many: pairs are
sorted by matrix on the device, and a program has a block of them. Neither reads anything back."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_gemm import store_block
from still_kernels.common.triton_shared import floats_of

SORTED = tl.constexpr(16)  # pairs, counts or blocks that a sorting program looks at together


@triton.jit
def _matrix_of(p_expert, o_pair, m_pair, E):
    """Where pairs go; within the matrices, as a TensorRT builder times kernels on garbage."""
    return tl.minimum(tl.maximum(tl.load(p_expert + o_pair, mask=m_pair, other=0), 0), E - 1)


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
    expert = _matrix_of(p_expert, pair, True, E).to(tl.int64)
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
        expert = _matrix_of(p_expert, pair, True, E).to(tl.int64)
        o_inner = begin + tl.arange(0, BK)
        b_middle = tl.load(p_middle + pair * M + o_inner, mask=o_inner < M, other=0.0).to(tl.float32)
        b_weight = _weights(
            p_down, p_down_scales, p_down_zero_points, expert * N + o_row, o_row < N, begin, M, BN, BK, BITS, BLOCK
        )  # fmt: skip
        b_sum += b_weight.to(tl.float32) * (b_middle * tl.load(p_weight + pair))[None, :]
    b_output = tl.sum(b_sum, 1).to(p_output.dtype.element_ty)
    tl.store(p_output + token * N + o_row, b_output, mask=o_row < N)


@triton.jit(do_not_specialize=["P", "E"])
def count_kernel(p_expert, p_counts, P, E, BP: tl.constexpr, EP: tl.constexpr):
    """How many of BP pairs go to each matrix, p_counts [ceil(P / BP), E]. Grid (ceil(P / BP))."""
    first = tl.program_id(0) * BP
    o_expert = tl.arange(0, EP)
    b_count = tl.zeros([EP], tl.int32)
    for begin in range(0, BP, SORTED):
        o_pair = first + begin + tl.arange(0, SORTED)
        b_expert = _matrix_of(p_expert, o_pair, o_pair < P, E)
        b_count += tl.sum(((b_expert[:, None] == o_expert[None, :]) & (o_pair < P)[:, None]).to(tl.int32), 0)
    tl.store(p_counts + tl.program_id(0) * E + o_expert, b_count, mask=o_expert < E)


@triton.jit(do_not_specialize=["E", "counted", "NB", "rows"])
def offsets_kernel(p_counts, p_firsts, p_blocks, E, counted, NB, rows, EP: tl.constexpr):
    """p_counts [counted, E] become those of the pairs in front, p_firsts [E] the place of a matrix's first pair, and p_blocks [NB, 3]
    the matrix of each block, its first place and the matrix's last. Grid (1)."""
    o_expert = tl.arange(0, EP)
    m_expert = o_expert < E
    b_total = tl.zeros([EP], tl.int32)
    for begin in range(0, counted, SORTED):
        o_part = begin + tl.arange(0, SORTED)
        p_count = p_counts + o_part[:, None] * E + o_expert[None, :]
        m_count = (o_part < counted)[:, None] & m_expert[None, :]
        b_count = tl.load(p_count, mask=m_count, other=0)
        tl.store(p_count, b_total[None, :] + tl.cumsum(b_count, 0) - b_count, mask=m_count)
        b_total += tl.sum(b_count, 0)
    b_last = tl.cumsum(b_total, 0)
    b_first = b_last - b_total
    tl.store(p_firsts + o_expert, b_first, mask=m_expert)
    b_blocks = (b_total + rows - 1) // rows
    b_behind = tl.cumsum(b_blocks, 0)
    b_before = (b_behind - b_blocks)[None, :]
    for begin in range(0, NB, SORTED):
        o_block = begin + tl.arange(0, SORTED)
        m_mine = (b_before <= o_block[:, None]) & (o_block[:, None] < b_behind[None, :])
        p_block = p_blocks + o_block * 3
        b_start = b_first[None, :] + (o_block[:, None] - b_before) * rows
        tl.store(p_block, tl.sum(tl.where(m_mine, o_expert[None, :], 0), 1), mask=o_block < NB)
        tl.store(p_block + 1, tl.sum(tl.where(m_mine, b_start, 0), 1), mask=o_block < NB)
        tl.store(p_block + 2, tl.sum(tl.where(m_mine, b_last[None, :], 0), 1), mask=o_block < NB)


@triton.jit(do_not_specialize=["P", "E"])
def sort_kernel(p_expert, p_counts, p_firsts, p_order, P, E, BP: tl.constexpr):
    """Pairs in the order of their matrices, p_order [P]. Grid (ceil(P / BP))."""
    first = tl.program_id(0) * BP
    o_pair = first + tl.arange(0, BP)
    m_pair = o_pair < P
    b_expert = _matrix_of(p_expert, o_pair, m_pair, E)
    b_place = tl.load(p_firsts + b_expert, mask=m_pair, other=0)
    b_place += tl.load(p_counts + tl.program_id(0) * E + b_expert, mask=m_pair, other=0)
    for begin in range(0, BP, SORTED):
        o_other = first + begin + tl.arange(0, SORTED)
        b_other = _matrix_of(p_expert, o_other, o_other < P, E)
        m_before = (b_other[None, :] == b_expert[:, None]) & (o_other[None, :] < o_pair[:, None])
        b_place += tl.sum(m_before.to(tl.int32), 1)
    tl.store(p_order + b_place, o_pair, mask=m_pair)


@triton.jit
def _block_sum(p_left, p_weight, p_scales, p_zero_points, o_row, m_row, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               STAGES: tl.constexpr, DOT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rows that begin at p_left [BM] times rows o_row [BN] of matrices, [BM, BN]."""
    b_sum = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        o_inner = begin + tl.arange(0, BK)
        b_left = tl.load(p_left[:, None] + o_inner[None, :], mask=(o_inner < K)[None, :], other=0.0)
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
        b_sum = _block_sum(p_input + b_token.to(tl.int64) * N, p_gate_up, p_gate_up_scales, p_gate_up_zero_points, expert * R + o_row,
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
        b_sum = _block_sum(p_left, p_down, p_down_scales, p_down_zero_points, expert * N + o_row, o_row < N, M, BM, BN, BK, STAGES, DOT,
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
