"""Few tokens times their experts. A program computes some outputs of one (token, expert) pair, or of all pairs of a token.

Warps process tiles of a pair's inputs. They request so many at once that a program mostly waits for memory only once. Codes go into matrix
instructions like those of MatMulNBits (`still_kernels.common.gluon_codes`), with the token in the first column.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from still_kernels.common import triton_grouped
from still_kernels.common.gluon_codes import (
    inputs_layout,
    middle,
    multiplied,
    sums_layout,
    twice,
    words_layout,
    zeros_of,
)


@gluon.jit
def _tile(turn, o_split, p_expert, first, pairs, tiles, E):
    """Tiles [SPLITS] of warps in a turn: pair, expert, tile within the pair, and whether there is one."""
    tile = turn + o_split
    m_tile = tile < pairs * tiles
    pair = first + gl.minimum(tile // tiles, pairs - 1)
    expert = gl.minimum(gl.maximum(gl.load(p_expert + pair), 0), E - 1)  # a TensorRT builder times kernels on garbage
    return pair, expert.to(gl.int64), tile % tiles, m_tile


@gluon.jit
def _read_weight(
    turn, p_expert, p_words, p_scales, p_zero_points, first, pairs, E, N, K, output,
    BITS: gl.constexpr, BLOCK: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Words, scales, words of zero points and how many bits up these are, of the outputs from `output` on; what is not there has a scale
    of 0."""
    CHUNK: gl.constexpr = 128 // BITS
    CODES: gl.constexpr = 32 // BITS
    STEP: gl.constexpr = 4 * UNITS
    words_in: gl.constexpr = words_layout(SPLITS, BN, UNITS)
    blocks_in: gl.constexpr = gl.SliceLayout(3, words_in)
    o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, blocks_in)))
    o_output = output + gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, blocks_in)))
    o_step = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, blocks_in)))
    o_word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, words_in))))
    chunks, blocks = K // CHUNK, K // BLOCK
    _pair, expert, tile, m_tile = _tile(turn, o_split, p_expert, first, pairs, (chunks + STEP - 1) // STEP, E)
    chunk = (tile * STEP)[:, None, None] + o_step[None, None, :]
    m_chunk = m_tile[:, None, None] & (chunk < chunks)
    row = (expert * N)[:, None, None] + gl.minimum(o_output, N - 1)[None, :, None]
    p_chunk = p_words + row * (chunks * 4) + chunk * 4
    p_word = gl.expand_dims(p_chunk, 3) + o_word[None, None, None, :]
    words = gl.load(p_word, mask=gl.expand_dims(m_chunk, 3), other=0)
    block = chunk * CHUNK // BLOCK
    b_scale = gl.load(p_scales + row * blocks + block, mask=m_chunk, other=0.0)
    if p_zero_points is None:
        zeros = block
    else:
        p_zero = p_zero_points + row * ((blocks + CODES - 1) // CODES) + block // CODES
        zeros = gl.load(p_zero, mask=m_chunk, other=0)
    return words, b_scale, zeros, block % CODES * BITS


@gluon.jit
def _read_input(
    turn, p_input, p_expert, p_share, first, pairs, sharing, E, K, BITS: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr
):  # fmt: skip
    """Activations [SPLITS, 8, inputs], all but the first row 0, of rows that so many pairs share, and the pairs' weights [SPLITS]."""
    CHUNK: gl.constexpr = 128 // BITS
    STEP: gl.constexpr = 4 * UNITS
    inputs_in: gl.constexpr = inputs_layout(SPLITS, UNITS, CHUNK)
    o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, inputs_in)))
    o_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, inputs_in)))
    o_column = gl.arange(0, STEP * CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, inputs_in)))
    tiles = (K // CHUNK + STEP - 1) // STEP
    pair, _expert, tile, m_tile = _tile(turn, o_split, p_expert, first, pairs, tiles, E)
    column = (tile * (STEP * CHUNK))[:, None, None] + o_column[None, None, :]
    m_input = m_tile[:, None, None] & (column < K) & (o_row == 0)[None, :, None]
    b_input = gl.load(p_input + (pair // sharing).to(gl.int64)[:, None, None] * K + column, mask=m_input, other=0.0)
    if p_share is None:
        b_share = m_tile
    else:
        o_sum = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, sums_layout(SPLITS))))
        o_pair, _expert, _tile_of, _m_tile = _tile(turn, o_sum, p_expert, first, pairs, tiles, E)
        b_share = gl.load(p_share + o_pair)
    return b_input, b_share


@gluon.jit
def _products(
    p_input, p_expert, p_share, p_words, p_scales, p_zero_points, first, pairs, sharing, E, N, K, output,
    BITS: gl.constexpr, BLOCK: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Outputs from `output` on of the pairs first .. first + pairs - 1, summed times their weights, float32 [BN].

    p_input: Rows of K numbers, each of `sharing` pairs. p_share: None: 1. p_words: Of experts of N outputs.
    """
    CHUNK: gl.constexpr = 128 // BITS
    STEP: gl.constexpr = 4 * UNITS
    sums_in: gl.constexpr = sums_layout(SPLITS)
    KIND: gl.constexpr = p_input.dtype.element_ty
    K = K // 32 * 32  # which tells the compiler
    all_tiles = pairs * ((K // CHUNK + STEP - 1) // STEP)
    b_sum = gl.zeros([SPLITS, BN, 8], gl.float32, layout=sums_in)
    for turn in range(0, all_tiles, SPLITS):
        words, b_scale, zeros, shift = _read_weight(
            turn,
            p_expert,
            p_words,
            p_scales,
            p_zero_points,
            first,
            pairs,
            E,
            N,
            K,
            output,
            BITS,
            BLOCK,
            BN,
            SPLITS,
            UNITS,
        )
        b_input, b_share = _read_input(
            turn, p_input, p_expert, p_share, first, pairs, sharing, E, K, BITS, SPLITS, UNITS
        )
        if p_zero_points is None:
            MIDDLE: gl.constexpr = middle(BITS, KIND == gl.bfloat16)
            zero = gl.full(
                [SPLITS, BN, STEP], MIDDLE, gl.int32, layout=gl.SliceLayout(3, words_layout(SPLITS, BN, UNITS))
            )
        else:
            zero = zeros_of(zeros, shift, BITS, KIND)
        if p_share is None:
            b_sum = multiplied(words, zero, twice(b_scale), None, b_input, b_sum, BITS, BN, SPLITS, UNITS)
        else:
            b_part = gl.zeros([SPLITS, BN, 8], gl.float32, layout=sums_in)
            b_part = multiplied(words, zero, twice(b_scale), None, b_input, b_part, BITS, BN, SPLITS, UNITS)
            b_sum += b_part * b_share[:, None, None]
    return gl.sum(gl.sum(b_sum, 2), 0)


@gluon.jit(do_not_specialize=["C", "E", "N", "M", "R"])
def few_codes_gate_up_kernel(
    p_input, p_expert, p_gate_up, p_gate_up_scales, p_gate_up_zero_points, p_middle, C, E, N, M, R, BITS: gl.constexpr,
    BLOCK: gl.constexpr, GATED: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """p_middle [tokens * C, M] of p_input [tokens, N] and p_gate_up [E, R, N]. Grid (ceil(R / BN), C, tokens)."""
    pair = gl.program_id(2) * C + gl.program_id(1)
    output = gl.program_id(0) * BN
    b_sum = _products(
        p_input, p_expert, None, p_gate_up, p_gate_up_scales, p_gate_up_zero_points, pair, 1, C, E, R, N, output,
        BITS, BLOCK, BN, SPLITS, UNITS,
    )  # fmt: skip
    OUTPUTS: gl.constexpr = BN // 2 if GATED else BN
    row_in: gl.constexpr = gl.BlockedLayout([BN // OUTPUTS], [32], [SPLITS], [0])
    b_sum = gl.convert_layout(b_sum, row_in)
    if GATED:
        b_gate, b_up = gl.split(gl.reshape(b_sum, [OUTPUTS, 2]))
        b_middle = b_gate / (1 + gl.exp(-b_gate)) * b_up
    else:
        b_up = gl.maximum(b_sum, 0.0)
        b_middle = b_up * b_up
    middle_in: gl.constexpr = gl.BlockedLayout([1], [32], [SPLITS], [0])
    b_middle = gl.convert_layout(b_middle, middle_in)
    o_middle = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, layout=middle_in)
    gl.store(p_middle + pair.to(gl.int64) * M + o_middle, b_middle.to(p_middle.dtype.element_ty), mask=o_middle < M)


@gluon.jit(do_not_specialize=["C", "E", "N", "M"])
def few_codes_down_kernel(
    p_expert, p_weight, p_middle, p_down, p_down_scales, p_down_zero_points, p_output, C, E, N, M, BITS: gl.constexpr,
    BLOCK: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """p_output [tokens, N] of p_middle and p_down [E, N, M], times p_weight [tokens, C]. Grid (ceil(N / BN), tokens)."""
    token, output = gl.program_id(1), gl.program_id(0) * BN
    b_sum = _products(
        p_middle, p_expert, p_weight, p_down, p_down_scales, p_down_zero_points, token * C, C, 1, E, N, M, output,
        BITS, BLOCK, BN, SPLITS, UNITS,
    )  # fmt: skip
    row_in: gl.constexpr = gl.BlockedLayout([1], [32], [SPLITS], [0])
    o_output = output + gl.arange(0, BN, layout=row_in)
    b_output = gl.convert_layout(b_sum, row_in).to(p_output.dtype.element_ty)
    gl.store(p_output + token.to(gl.int64) * N + o_output, b_output, mask=o_output < N)


FUNCTIONS = {
    **triton_grouped.FUNCTIONS,
    "few_codes_gate_up": few_codes_gate_up_kernel,
    "few_codes_down": few_codes_down_kernel,
}
