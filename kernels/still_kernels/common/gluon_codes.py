"""Weights of 4 or 8 bits in matrix instructions of few rows: each code becomes a 16-bit number in registers.

A thread reads 16-byte chunks of a weight's row. Four neighbouring threads share a row of the matrix instruction and have neighbouring
chunks. The four inner numbers of a thread in an instruction come from its own chunk, so no data moves between threads. This defines the
order of inputs within an instruction, equal for weights and activations. Warps split the inputs and add up at the end, always in the same
order.

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
def twice(x):
    """The 16 bits of each number, twice in a word."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $1};", "=r,h", [x.to(gl.int16, bitcast=True)], dtype=gl.int32, is_pure=True, pack=1
    )


# A number whose lowest bit of 16 stands for 1 has an integer in its lowest bits: 0x6400 is 1024 in half precision, 0x4300 is 128 in
# bfloat16, which has room for four bits; 0x4500 is 2048 there, and its lowest bit 16.
_FOUR_HALVES = """
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
    fma.rn.f16x2 x3, x3, sixteenth, high;"""
_EIGHT_HALVES = """
    .reg .b32 x0, x1, high;
    mov.b32 high, 0x64646464;
    prmt.b32 x0, $4, high, 0x4140;
    prmt.b32 x1, $4, high, 0x4342;
    add.rn.f16x2 x0, x0, $5;
    add.rn.f16x2 x1, x1, $5;"""
_FOUR_BRAINS = """
    .reg .b32 x0, x1, x2, x3, one;
    mov.b32 one, 0x3F803F80;
    shr.u32 x1, $8, 4;
    shr.u32 x2, $8, 8;
    shr.u32 x3, $8, 12;
    lop3.b32 x0, $8, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 x1, x1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 x2, x2, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 x3, x3, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 x0, x0, one, $9;
    fma.rn.bf16x2 x1, x1, one, $9;
    fma.rn.bf16x2 x2, x2, one, $9;
    fma.rn.bf16x2 x3, x3, one, $9;"""
_EIGHT_BRAINS = """
    .reg .b32 x0, x1, y0, y1, one, low, high;
    mov.b32 one, 0x3F803F80;
    prmt.b32 low, $5, $5, 0x1010;
    prmt.b32 high, $5, $5, 0x3232;
    prmt.b32 x0, $4, $4, 0x1100;
    prmt.b32 x1, $4, $4, 0x3322;
    shr.u32 y0, x0, 4;
    shr.u32 y1, x1, 4;
    lop3.b32 x0, x0, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 x1, x1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 y0, y0, 0x000F000F, 0x45004500, 0xEA;
    lop3.b32 y1, y1, 0x000F000F, 0x45004500, 0xEA;
    fma.rn.bf16x2 x0, x0, one, low;
    fma.rn.bf16x2 x1, x1, one, low;
    fma.rn.bf16x2 y0, y0, one, high;
    fma.rn.bf16x2 y1, y1, one, high;
    fma.rn.bf16x2 x0, x0, one, y0;
    fma.rn.bf16x2 x1, x1, one, y1;"""


@gluon.constexpr_function
def unpacking(BITS, BRAIN, OFFSETS):
    """Assembly: of words, zeros and scales, numbers scale * (code - zero), or with an offset behind."""
    count = 32 // BITS
    pairs = count // 2
    text = {4: (_FOUR_HALVES, _FOUR_BRAINS), 8: (_EIGHT_HALVES, _EIGHT_BRAINS)}[BITS][BRAIN]
    last = f"${count + 3}" if OFFSETS else "none"
    text += "\n.reg .b32 none; mov.b32 none, 0x80008000;"  # -0, which changes no sum
    kind = "bf16x2" if BRAIN else "f16x2"
    for i in range(pairs):  # pairs of a register are four codes apart, of eight bits neighbours
        low, high = (i, i + 4) if BITS == 4 else (2 * i, 2 * i + 1)
        text += f"\nfma.rn.{kind} x{i}, x{i}, ${count + 2}, {last}; mov.b32 {{${low}, ${high}}}, x{i};"
    return "{" + text + "}"


@gluon.constexpr_function
def registers(BITS, OFFSETS):
    """Constraints of that."""
    return "=h," * (32 // BITS) + ("r,r,r,r" if OFFSETS else "r,r,r")


@gluon.constexpr_function
def times(kind, count):
    """A type for each of several results."""
    return (kind,) * count


@gluon.constexpr_function
def middle(BITS, BRAIN):
    """What `zeros_of` gives where there are no zero points."""
    word = {4: (0xE408E408, 0xC308C308), 8: (0xE480E480, 0xC508C300)}[BITS][BRAIN]
    return word - (1 << 32)


@gluon.constexpr_function
def zeroing(BITS, BRAIN):
    """Assembly: of words and shifts, what is added to a code."""
    texts = {4: ("0x0000000F, 0x0000E400", "0x0000000F, 0x0000C300"), 8: ("0x000000FF, 0x0000E400", "")}
    text = "{ .reg .b32 x, y; shr.u32 x, $1, $2; "
    if BITS == 8 and BRAIN:  # both halves of a code
        text += "shr.u32 y, x, 4; lop3.b32 x, x, 0x0000000F, 0x0000C300, 0xEA; lop3.b32 y, y, 0x0000000F, 0x0000C500, 0xEA; "
        return text + "prmt.b32 $0, x, y, 0x5410; }"
    return text + f"lop3.b32 x, x, {texts[BITS][BRAIN]}, 0xEA; prmt.b32 $0, x, x, 0x1010; }}"


@gluon.jit
def zeros_of(word, shift, BITS: gl.constexpr, KIND: gl.constexpr):
    """Minus the zero point that is `shift` bits up in a word, and minus what codes are in addition, as two 16-bit numbers."""
    return gl.inline_asm_elementwise(
        zeroing(BITS, KIND == gl.bfloat16), "=r,r,r", [word, shift], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _numbers(words, zero, scale, offset, BITS: gl.constexpr, KIND: gl.constexpr):
    """Numbers scale * (code - zero) + offset of each word, joined in their order, [..., 2, 2, 2] or of 8 bits [..., 2, 2].

    zero: Of `zeros_of`. scale: Of `twice`. offset: So, or None: 0.
    """
    zero, scale = gl.expand_dims(zero, 3), gl.expand_dims(scale, 3)
    operands = (words, zero, scale) if offset is None else (words, zero, scale, gl.expand_dims(offset, 3))
    TEXT: gl.constexpr = unpacking(BITS, KIND == gl.bfloat16, offset is not None)
    REGISTERS: gl.constexpr = registers(BITS, offset is not None)
    if BITS == 4:
        e0, e1, e2, e3, e4, e5, e6, e7 = gl.inline_asm_elementwise(
            TEXT, REGISTERS, operands, dtype=times(KIND, 8), is_pure=True, pack=1
        )
        even, odd = gl.join(gl.join(e0, e4), gl.join(e2, e6)), gl.join(gl.join(e1, e5), gl.join(e3, e7))
        found = gl.join(even, odd)
    else:
        e0, e1, e2, e3 = gl.inline_asm_elementwise(
            TEXT, REGISTERS, operands, dtype=times(KIND, 4), is_pure=True, pack=1
        )
        found = gl.join(gl.join(e0, e2), gl.join(e1, e3))
    return found


@gluon.jit
def multiplied(
    words, zero, scale, offset, b_input, b_sum, BITS: gl.constexpr, BN: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr
):  # fmt: skip
    """b_sum [SPLITS, BN, 8] and the products of words [SPLITS, BN, 4 * UNITS chunks, 4] with activations [SPLITS, 8, their inputs].

    zero, scale, offset: Of chunks, as `_numbers` takes them.
    """
    CHUNK: gl.constexpr = 128 // BITS
    sums_in: gl.constexpr = sums_layout(SPLITS)
    weight = _numbers(words, zero, scale, offset, BITS, b_input.dtype)
    # Inner numbers in the order in which threads have them: last the pair of a register, before it the thread.
    if BITS == 4:
        weight = gl.permute(gl.reshape(weight, [SPLITS, BN, UNITS, 4, 4, 2, 4]), (0, 1, 2, 4, 6, 3, 5))
        b_input = gl.permute(gl.reshape(b_input, [SPLITS, 8, UNITS, 4, 4, 2, 4]), (0, 2, 4, 6, 3, 5, 1))
    else:
        weight = gl.permute(gl.reshape(weight, [SPLITS, BN, UNITS, 4, 4, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
        b_input = gl.permute(gl.reshape(b_input, [SPLITS, 8, UNITS, 4, 4, 2, 2]), (0, 2, 4, 5, 3, 6, 1))
    weight = gl.reshape(weight, [SPLITS, BN, 4 * UNITS * CHUNK])
    b_input = gl.reshape(b_input, [SPLITS, 4 * UNITS * CHUNK, 8])
    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, sums_in, 2), assert_trivial=True)
    b_input = gl.convert_layout(b_input, gl.DotOperandLayout(1, sums_in, 2), assert_trivial=True)
    return mma_v2(weight, b_input, b_sum)
