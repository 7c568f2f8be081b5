"""Few rows times a weight in blocks: each code is read once, converted to half precision in registers, and multiplied by matrix
instructions (`still_kernels.common.gluon_codes`)."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from still_kernels.common.gluon_codes import (
    groups_layout,
    inputs_layout,
    middle,
    multiplied,
    sums_layout,
    twice,
    words_layout,
    zeros_of,
)


@gluon.jit
def _read_weight(
    begin, end, p_blocks, p_scales, p_zero_points, p_offsets, BITS: gl.constexpr, BLOCK: gl.constexpr, BN: gl.constexpr,
    SPLITS: gl.constexpr, UNITS: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    """Chunks from `begin` on, 4 * UNITS for each of the SPLITS warps: words of codes, scales, words of zero points, offsets.

    p_blocks, p_scales, p_zero_points, p_offsets: Of the outputs' rows, [1, BN, 1].
    TURN: "whole": all these chunks are before `end`. "none": all or none, of which nothing is read. "last": some; what is read in the
        place of others is multiplied by 0.
    """
    CHUNK: gl.constexpr = 128 // BITS
    CODES: gl.constexpr = 32 // BITS
    STEP: gl.constexpr = 4 * UNITS
    GROUP: gl.constexpr = BLOCK // 4  # chunks of a word of zero points
    words_in: gl.constexpr = words_layout(SPLITS, BN, UNITS)
    blocks_in: gl.constexpr = gl.SliceLayout(3, words_in)
    o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, blocks_in)))
    o_step = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, blocks_in)))
    chunk = begin + (o_split * STEP)[:, None, None] + o_step[None, None, :]
    if TURN == "last":
        chunk = gl.minimum(chunk, end - 1)
    o_word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, words_in))))
    p_words = gl.expand_dims(p_blocks + chunk * 4, 3) + o_word[None, None, None, :]
    block = chunk * CHUNK // BLOCK
    if TURN == "none":
        m_chunk = chunk < end
        words = gl.load(p_words, mask=gl.expand_dims(m_chunk, 3), other=0)
        b_scale = gl.load(p_scales + block, mask=m_chunk, other=0.0)
        b_offset = b_scale if p_offsets is None else gl.load(p_offsets + block, mask=m_chunk, other=0.0)
    else:
        words = gl.load(p_words)
        b_scale = gl.load(p_scales + block)
        b_offset = b_scale if p_offsets is None else gl.load(p_offsets + block)
    if p_zero_points is None:
        zeros = block
    elif STEP % GROUP == 0 and TURN != "last":
        groups_in: gl.constexpr = groups_layout(SPLITS, BN, UNITS, GROUP)
        o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, groups_in))))
        o_group = gl.arange(0, STEP // GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, groups_in))))
        group = begin // GROUP + (o_split * (STEP // GROUP))[:, None, None] + o_group[None, None, :]
        p_group = gl.convert_layout(p_zero_points, gl.SliceLayout(3, groups_in), assert_trivial=True) + group
        if TURN == "none":
            zeros = gl.load(p_group, mask=group < end // GROUP, other=0)
        else:
            zeros = gl.load(p_group)
    elif TURN == "none":
        zeros = gl.load(p_zero_points + block // CODES, mask=m_chunk, other=0)
    else:
        zeros = gl.load(p_zero_points + block // CODES)
    return words, b_scale, zeros, b_offset


@gluon.jit
def _read_input(
    begin, end, p_input, BITS: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr, WHOLE: gl.constexpr
):
    """The activations of the same chunks. p_input: Of the rows of activations, [1, 8, 1]. Not WHOLE: 0 for chunks from `end` on."""
    CHUNK: gl.constexpr = 128 // BITS
    STEP: gl.constexpr = 4 * UNITS
    inputs_in: gl.constexpr = inputs_layout(SPLITS, UNITS, CHUNK)
    o_in = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, inputs_in))) * (STEP * CHUNK)
    o_column = gl.arange(0, STEP * CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, inputs_in)))
    column = begin * CHUNK + o_in[:, None, None] + o_column[None, None, :]
    if WHOLE:
        b_input = gl.load(p_input + column)
    else:
        b_input = gl.load(p_input + column, mask=column < end * CHUNK, other=0.0)
    return b_input


@gluon.jit
def _add(
    b_sum, words, b_scale, zeros, b_offset, b_input, begin, chunks,
    ZERO_POINTS: gl.constexpr, OFFSETS: gl.constexpr, BITS: gl.constexpr, BLOCK: gl.constexpr, BN: gl.constexpr,
    SPLITS: gl.constexpr, UNITS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """b_sum and the products of what `_read_weight` and `_read_input` gave."""
    CHUNK: gl.constexpr = 128 // BITS
    CODES: gl.constexpr = 32 // BITS
    STEP: gl.constexpr = 4 * UNITS
    GROUP: gl.constexpr = BLOCK // 4
    blocks_in: gl.constexpr = gl.SliceLayout(3, words_layout(SPLITS, BN, UNITS))
    scale = twice(b_scale)
    offset = twice(b_offset) if OFFSETS else None
    KIND: gl.constexpr = b_input.dtype
    if not ZERO_POINTS:
        zero = gl.full([SPLITS, BN, STEP], middle(BITS, KIND == gl.bfloat16), gl.int32, layout=blocks_in)
    elif STEP % GROUP == 0 and not LAST:
        groups_in: gl.constexpr = groups_layout(SPLITS, BN, UNITS, GROUP)
        o_chunk = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, groups_in))))
        shift = (o_chunk * CHUNK // BLOCK * BITS)[None, None, None, :]
        zero = gl.reshape(zeros_of(gl.expand_dims(zeros, 3), shift, BITS, KIND), [SPLITS, BN, STEP])
        zero = gl.convert_layout(zero, blocks_in, assert_trivial=True)
    else:
        o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, blocks_in)))
        o_step = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, blocks_in)))
        chunk = begin + (o_split * STEP)[:, None, None] + o_step[None, None, :]
        if LAST:
            chunk = gl.minimum(chunk, chunks - 1)
        zero = zeros_of(zeros, chunk * CHUNK // BLOCK % CODES * BITS, BITS, KIND)
    return multiplied(words, zero, scale, offset, b_input, b_sum, BITS, BN, SPLITS, UNITS)


@gluon.jit(do_not_specialize=["M", "N", "K", "ZW"])
def few_kernel(
    p_input, p_blocks, p_scales, p_zero_points, p_offsets, p_output,
    M, N, K, ZW,
    BITS: gl.constexpr, BLOCK: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """BN outputs of up to 8 rows. Grid (ceil(M / 8), ceil(N / BN)).

    AHEAD: What is asked for a turn of the loop before it is multiplied: 0: nothing, 1: the weight, 2: activations, too.

    p_input: [M, K]. p_blocks: Codes of [N, K], 32 / BITS in a word, the first one lowest. p_scales, p_offsets: [N, K / BLOCK].
    p_zero_points: Those of a row in ZW words. p_output: [M, N]. Rows and outputs that are not there are read as the last one, and not
    written.
    """
    CHUNK: gl.constexpr = 128 // BITS
    TURN: gl.constexpr = 4 * UNITS * SPLITS
    words_in: gl.constexpr = words_layout(SPLITS, BN, UNITS)
    inputs_in: gl.constexpr = inputs_layout(SPLITS, UNITS, CHUNK)
    sums_in: gl.constexpr = sums_layout(SPLITS)
    total_in: gl.constexpr = gl.SliceLayout(0, sums_in)
    K = K // 32 * 32  # which tells the compiler
    chunks = K // CHUNK
    first_row = gl.program_id(0) * 8
    first = gl.program_id(1) * BN

    o_output = first + gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, words_in))))
    row = gl.minimum(o_output, N - 1).to(gl.int64)[None, :, None]
    o_row = first_row + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, inputs_in)))
    p_row = p_input + gl.minimum(o_row, M - 1).to(gl.int64)[None, :, None] * K
    p_words = p_blocks + row * (chunks * 4)
    p_scale = p_scales + row * (K // BLOCK)
    p_zeros = None if p_zero_points is None else p_zero_points + row * ZW
    p_offset = None if p_offsets is None else p_offsets + row * (K // BLOCK)

    b_sum = gl.zeros([SPLITS, BN, 8], gl.float32, layout=sums_in)
    ZERO_POINTS: gl.constexpr = p_zero_points is not None
    OFFSETS: gl.constexpr = p_offsets is not None
    full = chunks // TURN * TURN
    if AHEAD > 0:
        words, scales, zeros, offsets = _read_weight(
            0, full, p_words, p_scale, p_zeros, p_offset, BITS, BLOCK, BN, SPLITS, UNITS, "none"
        )
    if AHEAD > 1:
        b_input = _read_input(0, full, p_row, BITS, SPLITS, UNITS, False)
    for begin in range(0, full, TURN):
        if AHEAD > 1:
            next_input = _read_input(begin + TURN, full, p_row, BITS, SPLITS, UNITS, False)
        else:
            b_input = _read_input(begin, full, p_row, BITS, SPLITS, UNITS, True)
        if AHEAD > 0:
            next_words, next_scales, next_zeros, next_offsets = _read_weight(
                begin + TURN, full, p_words, p_scale, p_zeros, p_offset, BITS, BLOCK, BN, SPLITS, UNITS, "none"
            )
        else:
            words, scales, zeros, offsets = _read_weight(
                begin, full, p_words, p_scale, p_zeros, p_offset, BITS, BLOCK, BN, SPLITS, UNITS, "whole"
            )
        b_sum = _add(b_sum, words, scales, zeros, offsets, b_input, begin, chunks, ZERO_POINTS, OFFSETS, BITS, BLOCK, BN, SPLITS, UNITS,
                     False)  # fmt: skip
        if AHEAD > 0:
            words, scales, zeros, offsets = next_words, next_scales, next_zeros, next_offsets
        if AHEAD > 1:
            b_input = next_input
    if full < chunks:
        last_input = _read_input(full, chunks, p_row, BITS, SPLITS, UNITS, False)
        last_words, last_scales, last_zeros, last_offsets = _read_weight(
            full, chunks, p_words, p_scale, p_zeros, p_offset, BITS, BLOCK, BN, SPLITS, UNITS, "last"
        )
        b_sum = _add(b_sum, last_words, last_scales, last_zeros, last_offsets, last_input, full, chunks, ZERO_POINTS, OFFSETS, BITS, BLOCK,
                     BN, SPLITS, UNITS, True)  # fmt: skip

    b_total = gl.sum(b_sum, 0)
    o_output = first + gl.arange(0, BN, layout=gl.SliceLayout(1, total_in))[:, None]
    o_row = first_row + gl.arange(0, 8, layout=gl.SliceLayout(0, total_in))[None, :]
    p_tile = p_output + o_row.to(gl.int64) * N + o_output
    gl.store(p_tile, b_total.to(p_output.dtype.element_ty), mask=(o_output < N) & (o_row < M))
