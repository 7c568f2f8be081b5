"""A few rows times a weight in blocks: each code is read once, made a half precision number in registers, and multiplied by matrix
instructions.

A thread reads chunks of 16 bytes of a weight's row. Four threads beside each other, which share a row of the matrix instruction, have
chunks beside each other; so the instruction's four inner numbers of a thread come from its own chunk, and nothing moves between threads.
The order of the inputs within an instruction follows from that, alike for weights and activations. Warps split the inputs and add up at
the end, always in the same order.

Triton's interpreter cannot run Gluon; `tests/still_kernels/gluon_interpreter.py` does.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def _powers(first, stop, place):
    """Bases first, 2 * first, ... below stop, each as `place` puts it into a list of coordinates."""
    bases = []
    while first < stop:
        bases.append(place(first))
        first *= 2
    return bases


@gluon.constexpr_function
def words_layout(SPLITS, BN, UNITS):
    """Of words [SPLITS, BN, 4 * UNITS chunks, 4]."""
    registers = [*_powers(1, 4, lambda i: [0, 0, 0, i]), [0, 8, 0, 0]]
    registers += _powers(4, 4 * UNITS, lambda i: [0, 0, i, 0]) + _powers(16, BN, lambda i: [0, i, 0, 0])
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = _powers(1, SPLITS, lambda i: [i, 0, 0, 0])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [SPLITS, BN, 4 * UNITS, 4])


@gluon.constexpr_function
def inputs_layout(SPLITS, UNITS, CHUNK):
    """Of activations [SPLITS, 8, 4 * UNITS * CHUNK]."""
    registers = _powers(1, CHUNK, lambda i: [0, 0, i]) + _powers(4 * CHUNK, 4 * UNITS * CHUNK, lambda i: [0, 0, i])
    lanes = [[0, 0, CHUNK], [0, 0, 2 * CHUNK], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = _powers(1, SPLITS, lambda i: [i, 0, 0])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [SPLITS, 8, 4 * UNITS * CHUNK])


@gluon.constexpr_function
def sums_layout(SPLITS):
    """Of sums [SPLITS, outputs, 8]."""
    return gl.NVMMADistributedLayout([2, 0], [SPLITS, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def groups_layout(SPLITS, BN, UNITS, GROUP):
    """Of chunks [SPLITS, BN, 4 * UNITS / GROUP, GROUP], those of a group share a word of zero points."""
    split = lambda i: [0, 0, i // GROUP, i % GROUP]  # noqa: E731
    registers = [[0, 8, 0, 0], *_powers(4, 4 * UNITS, split), *_powers(16, BN, lambda i: [0, i, 0, 0])]
    lanes = [split(1), split(2), [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, _powers(1, SPLITS, lambda i: [i, 0, 0, 0]), [], [SPLITS, BN, 4 * UNITS // GROUP, GROUP]
    )


@gluon.jit
def _twice(x):
    """The 16 bits of each half precision number, twice in a word."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _zeros(word, shift, BITS: gl.constexpr):
    """-(1024 + zero) twice, as half precision numbers: 0x6400 with an integer below 1024 in its lowest bits is 1024 more than that."""
    MASK: gl.constexpr = "0x0000000F" if BITS == 4 else "0x000000FF"
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x; shr.u32 x, $1, $2; lop3.b32 x, x, " + MASK + ", 0x0000E400, 0xEA; prmt.b32 $0, x, x, 0x1010; }",
        "=r,r,r",
        [word, shift],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


FOUR_BITS = gl.constexpr(
    """{
    .reg .b32 x0, x1, x2, x3, upper, sixteenth, high, far;
    mov.b32 sixteenth, 0x2C002C00;
    mov.b32 far, 0x63806380;
    add.rn.f16x2 high, $9, far;
    shr.u32 upper, $8, 8;
    lop3.b32 x0, $8, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 x1, $8, 0x00F000F0, 0x64006400, 0xEA;
    lop3.b32 x2, upper, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 x3, upper, 0x00F000F0, 0x64006400, 0xEA;
    add.rn.f16x2 x0, x0, $9;
    fma.rn.f16x2 x1, x1, sixteenth, high;
    add.rn.f16x2 x2, x2, $9;
    fma.rn.f16x2 x3, x3, sixteenth, high;
    mul.rn.f16x2 x0, x0, $10;
    mul.rn.f16x2 x1, x1, $10;
    mul.rn.f16x2 x2, x2, $10;
    mul.rn.f16x2 x3, x3, $10;
    mov.b32 {$0, $4}, x0;
    mov.b32 {$1, $5}, x1;
    mov.b32 {$2, $6}, x2;
    mov.b32 {$3, $7}, x3;
    }"""
)
EIGHT_BITS = gl.constexpr(
    """{
    .reg .b32 x0, x1, high;
    mov.b32 high, 0x64646464;
    prmt.b32 x0, $4, high, 0x4140;
    prmt.b32 x1, $4, high, 0x4342;
    add.rn.f16x2 x0, x0, $5;
    add.rn.f16x2 x1, x1, $5;
    mul.rn.f16x2 x0, x0, $6;
    mul.rn.f16x2 x1, x1, $6;
    mov.b32 {$0, $1}, x0;
    mov.b32 {$2, $3}, x1;
    }"""
)
"""Of words, zeros and scales: numbers scale * (code - zero)."""


@gluon.constexpr_function
def _moved(code, scale, offset):
    """`code` with an addition in each product with the operand `scale`."""
    parts = code.split("mul.rn.f16x2 ")
    return parts[0] + "".join(
        f"fma.rn.f16x2 {part.replace(f'${scale};', f'${scale}, ${offset};', 1)}" for part in parts[1:]
    )


@gluon.jit
def _four_bits(words, zero, scale, offset):
    """Eight numbers scale * (code - zero) + offset of each word, joined in their order; pairs of a register are four codes apart.

    zero: Of `_zeros`. offset: None: 0. Four bits higher than the lowest, a code makes 0x6400 to 1024 + 16 * code.
    """
    if offset is None:
        e0, e1, e2, e3, e4, e5, e6, e7 = gl.inline_asm_elementwise(
            FOUR_BITS,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [words, gl.expand_dims(zero, 3), gl.expand_dims(scale, 3)],
            dtype=(gl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        e0, e1, e2, e3, e4, e5, e6, e7 = gl.inline_asm_elementwise(
            _moved(FOUR_BITS, 10, 11),
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
            [words, gl.expand_dims(zero, 3), gl.expand_dims(scale, 3), gl.expand_dims(offset, 3)],
            dtype=(gl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    even, odd = gl.join(gl.join(e0, e4), gl.join(e2, e6)), gl.join(gl.join(e1, e5), gl.join(e3, e7))
    return gl.join(even, odd)  # [..., 2, 2, 2]


@gluon.jit
def _eight_bits(words, zero, scale, offset):
    """Four numbers scale * (code - zero) + offset of each word, joined in their order; pairs of a register are neighbours."""
    if offset is None:
        e0, e1, e2, e3 = gl.inline_asm_elementwise(
            EIGHT_BITS,
            "=h,=h,=h,=h,r,r,r",
            [words, gl.expand_dims(zero, 3), gl.expand_dims(scale, 3)],
            dtype=(gl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        e0, e1, e2, e3 = gl.inline_asm_elementwise(
            _moved(EIGHT_BITS, 6, 7),
            "=h,=h,=h,=h,r,r,r,r",
            [words, gl.expand_dims(zero, 3), gl.expand_dims(scale, 3), gl.expand_dims(offset, 3)],
            dtype=(gl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
    return gl.join(gl.join(e0, e2), gl.join(e1, e3))  # [..., 2, 2]


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
    sums_in: gl.constexpr = sums_layout(SPLITS)
    blocks_in: gl.constexpr = gl.SliceLayout(3, words_layout(SPLITS, BN, UNITS))
    scale = _twice(b_scale)
    offset = _twice(b_offset) if OFFSETS else None
    if not ZERO_POINTS:
        zero = gl.full(
            [SPLITS, BN, STEP], (0xE400 + (1 << (BITS - 1))) * 0x10001 - (1 << 32), gl.int32, layout=blocks_in
        )
    elif STEP % GROUP == 0 and not LAST:
        groups_in: gl.constexpr = groups_layout(SPLITS, BN, UNITS, GROUP)
        o_chunk = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, groups_in))))
        shift = (o_chunk * CHUNK // BLOCK * BITS)[None, None, None, :]
        zero = gl.reshape(_zeros(gl.expand_dims(zeros, 3), shift, BITS), [SPLITS, BN, STEP])
        zero = gl.convert_layout(zero, blocks_in, assert_trivial=True)
    else:
        o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, blocks_in)))
        o_step = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, blocks_in)))
        chunk = begin + (o_split * STEP)[:, None, None] + o_step[None, None, :]
        if LAST:
            chunk = gl.minimum(chunk, chunks - 1)
        zero = _zeros(zeros, chunk * CHUNK // BLOCK % CODES * BITS, BITS)
    # Inner numbers in the order in which threads have them: last the pair of a register, before it the thread.
    if BITS == 4:
        weight = gl.reshape(_four_bits(words, zero, scale, offset), [SPLITS, BN, UNITS, 4, 4, 2, 4])
        weight = gl.permute(weight, (0, 1, 2, 4, 6, 3, 5))
        b_input = gl.permute(gl.reshape(b_input, [SPLITS, 8, UNITS, 4, 4, 2, 4]), (0, 2, 4, 6, 3, 5, 1))
    else:
        weight = gl.reshape(_eight_bits(words, zero, scale, offset), [SPLITS, BN, UNITS, 4, 4, 2, 2])
        weight = gl.permute(weight, (0, 1, 2, 4, 5, 3, 6))
        b_input = gl.permute(gl.reshape(b_input, [SPLITS, 8, UNITS, 4, 4, 2, 2]), (0, 2, 4, 5, 3, 6, 1))
    weight = gl.reshape(weight, [SPLITS, BN, STEP * CHUNK])
    b_input = gl.reshape(b_input, [SPLITS, STEP * CHUNK, 8])
    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, sums_in, 2), assert_trivial=True)
    b_input = gl.convert_layout(b_input, gl.DotOperandLayout(1, sums_in, 2), assert_trivial=True)
    return mma_v2(weight, b_input, b_sum)


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
