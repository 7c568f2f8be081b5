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

COLUMNS = gl.constexpr(8)
"""Rows of activations that a program takes: columns of the matrix instruction."""


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


@gluon.jit
def _four_bits(words, zero, scale):
    """Eight numbers scale * (code - zero) of each word, joined in their order; pairs of a register are four codes apart.

    0x6400 with a code in its lowest bits is 1024 + code in half precision; four bits higher it is 1024 + 16 * code.
    """
    low, high = (zero + 0xE400) * 0x10001, (zero * 16 + 0xD400) * 0x10001  # -(1024 + zero), -(64 + zero), twice
    e0, e1, e2, e3, e4, e5, e6, e7 = gl.inline_asm_elementwise(
        """{
        .reg .b32 x0, x1, x2, x3, upper, sixteenth;
        mov.b32 sixteenth, 0x2C002C00;
        shr.u32 upper, $8, 8;
        lop3.b32 x0, $8, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 x1, $8, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 x2, upper, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 x3, upper, 0x00F000F0, 0x64006400, 0xEA;
        add.rn.f16x2 x0, x0, $9;
        fma.rn.f16x2 x1, x1, sixteenth, $10;
        add.rn.f16x2 x2, x2, $9;
        fma.rn.f16x2 x3, x3, sixteenth, $10;
        mul.rn.f16x2 x0, x0, $11;
        mul.rn.f16x2 x1, x1, $11;
        mul.rn.f16x2 x2, x2, $11;
        mul.rn.f16x2 x3, x3, $11;
        mov.b32 {$0, $4}, x0;
        mov.b32 {$1, $5}, x1;
        mov.b32 {$2, $6}, x2;
        mov.b32 {$3, $7}, x3;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
        [words, gl.expand_dims(low, 3), gl.expand_dims(high, 3), gl.expand_dims(scale, 3)],
        dtype=(gl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    even, odd = gl.join(gl.join(e0, e4), gl.join(e2, e6)), gl.join(gl.join(e1, e5), gl.join(e3, e7))
    return gl.join(even, odd)  # [..., 2, 2, 2]


@gluon.jit
def _eight_bits(words, zero, scale):
    """Four numbers scale * (code - zero) of each word, joined in their order; pairs of a register are neighbours."""
    low = (zero + 0xE400) * 0x10001  # -(1024 + zero), twice
    e0, e1, e2, e3 = gl.inline_asm_elementwise(
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
        }""",
        "=h,=h,=h,=h,r,r,r",
        [words, gl.expand_dims(low, 3), gl.expand_dims(scale, 3)],
        dtype=(gl.float16,) * 4,
        is_pure=True,
        pack=1,
    )
    return gl.join(gl.join(e0, e2), gl.join(e1, e3))  # [..., 2, 2]


@gluon.jit
def _sixteen_bits(words):
    """The two numbers of each word, joined."""
    e0, e1 = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.float16,) * 2, is_pure=True, pack=1
    )
    return gl.join(e0, e1)


@gluon.jit(do_not_specialize=["M", "N", "K", "ZW"])
def few_kernel(
    p_input,
    p_blocks,
    p_scales,
    p_zero_points,
    p_output,
    M,
    N,
    K,
    ZW,
    BITS: gl.constexpr,
    BLOCK: gl.constexpr,
    BN: gl.constexpr,
    SPLITS: gl.constexpr,
    UNITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """BN outputs of up to 8 rows. Grid (ceil(M / 8), ceil(N / BN)).

    p_input: [M, K]. p_blocks: Codes of [N, K], 32 / BITS in a word, the first one lowest. p_scales: [N, K / BLOCK]. p_zero_points: Those of
    a row in ZW words. p_output: [M, N]. Weights of 16 bits have neither scales nor zero points.
    """
    CHUNK: gl.constexpr = 128 // BITS
    CODES: gl.constexpr = 32 // BITS
    STEP: gl.constexpr = 4 * UNITS
    words_in: gl.constexpr = words_layout(SPLITS, BN, UNITS)
    inputs_in: gl.constexpr = inputs_layout(SPLITS, UNITS, CHUNK)
    product_in: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLITS, 1, 1], instr_shape=[1, 16, 8])
    blocks_in: gl.constexpr = gl.SliceLayout(3, words_in)
    K = K // 32 * 32  # which tells the compiler
    chunks = K // CHUNK
    first_row = gl.program_id(0) * COLUMNS
    first = gl.program_id(1) * BN
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [M], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [M], dtype=gl.int32, is_pure=False, pack=1
        )

    o_output = first + gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, blocks_in)))
    m_output = (o_output < N)[None, :, None]
    row = o_output.to(gl.int64)[None, :, None]
    o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, blocks_in)))
    o_step = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, blocks_in)))
    o_chunk = (o_split * STEP)[:, None, None] + o_step[None, None, :]
    o_word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, words_in))))
    o_word = o_word[None, None, None, :]

    o_row = first_row + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, inputs_in)))
    m_row = (o_row < M)[None, :, None]
    p_row = p_input + o_row.to(gl.int64)[None, :, None] * K
    o_in = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, inputs_in))) * (STEP * CHUNK)
    o_column = gl.arange(0, STEP * CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, inputs_in)))
    o_column = o_in[:, None, None] + o_column[None, None, :]

    b_sum = gl.zeros([SPLITS, BN, 8], gl.float32, layout=product_in)
    for begin in range(0, chunks, SPLITS * STEP):
        chunk = begin + o_chunk
        live = m_output & (chunk < chunks)
        p_chunk = p_blocks + (row * chunks + chunk) * 4
        words = gl.load(gl.expand_dims(p_chunk, 3) + o_word, mask=gl.expand_dims(live, 3), other=0)
        column = begin * CHUNK + o_column
        b_input = gl.load(p_row + column, mask=m_row & (column < K), other=0.0)
        if BITS == 16:
            weight = _sixteen_bits(words)
        else:
            block = chunk * CHUNK // BLOCK
            b_scale = gl.load(p_scales + row * (K // BLOCK) + block, mask=live, other=0.0)
            scale = (b_scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
            if p_zero_points is None:
                zero = gl.full([SPLITS, BN, STEP], 1 << (BITS - 1), gl.int32, layout=blocks_in)
            else:
                zeros = gl.load(p_zero_points + row * ZW + block // CODES, mask=live, other=0)
                zero = (zeros >> (block % CODES * BITS)) & ((1 << BITS) - 1)
            if BITS == 4:
                weight = _four_bits(words, zero, scale)
            else:
                weight = _eight_bits(words, zero, scale)
        # Inner numbers in the order in which threads have them: last the pair of a register, before it the thread.
        if BITS == 4:
            weight = gl.permute(gl.reshape(weight, [SPLITS, BN, UNITS, 4, 4, 2, 4]), (0, 1, 2, 4, 6, 3, 5))
            b_input = gl.permute(gl.reshape(b_input, [SPLITS, 8, UNITS, 4, 4, 2, 4]), (0, 2, 4, 6, 3, 5, 1))
        elif BITS == 8:
            weight = gl.permute(gl.reshape(weight, [SPLITS, BN, UNITS, 4, 4, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
            b_input = gl.permute(gl.reshape(b_input, [SPLITS, 8, UNITS, 4, 4, 2, 2]), (0, 2, 4, 5, 3, 6, 1))
        else:
            weight = gl.permute(gl.reshape(weight, [SPLITS, BN, UNITS, 4, 4, 2]), (0, 1, 2, 4, 3, 5))
            b_input = gl.permute(gl.reshape(b_input, [SPLITS, 8, UNITS, 4, 4, 2]), (0, 2, 4, 3, 5, 1))
        weight = gl.reshape(weight, [SPLITS, BN, STEP * CHUNK])
        b_input = gl.reshape(b_input, [SPLITS, STEP * CHUNK, 8])
        weight = gl.convert_layout(weight, gl.DotOperandLayout(0, product_in, 2), assert_trivial=True)
        b_input = gl.convert_layout(b_input, gl.DotOperandLayout(1, product_in, 2), assert_trivial=True)
        b_sum = mma_v2(weight, b_input, b_sum)

    b_total = gl.sum(b_sum, 0)
    total_in: gl.constexpr = gl.SliceLayout(0, product_in)
    o_output = first + gl.arange(0, BN, layout=gl.SliceLayout(1, total_in))[:, None]
    o_row = first_row + gl.arange(0, 8, layout=gl.SliceLayout(0, total_in))[None, :]
    p_tile = p_output + o_row.to(gl.int64) * N + o_output
    gl.store(p_tile, b_total.to(p_output.dtype.element_ty), mask=(o_output < N) & (o_row < M))
