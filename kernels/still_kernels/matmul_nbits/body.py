"""Function bodies of still::MatMulNBits: dequantize, then multiply; and around ONNX Runtime's op of that name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import TensorProto

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_kernels.matmul_nbits.spec import MATMUL_NBITS, NUMBERS, SUPER, TILE, WORDS

WORD_BITS = 32
LOW_BITS, HIGH_BITS = (0, 8, 16, 24, 4, 12, 20, 28), tuple(i % 4 * 8 + i // 4 * 2 for i in range(16))
"""Bit positions in a word of the inputs' low four bits, and high two bits."""
ROUNDED = 4
"""Accuracy level of com.microsoft::MatMulNBits that rounds activations to 8 bits, the only fast one on CPUs."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`, in float32 with the weight rounded to the activations' type, as in kernels."""
    bits, block, zero_code = _form(node, dims)
    b = Scope()
    if _attributes(node)["super_block"]:
        b.cast(b("MatMul", b.cast("input", FLOAT), _super_blocks(b, bits, dims)), dtype, out="output")
        return b.function(MATMUL_NBITS, node, {"": opset}, "blocks")

    def codes(words: str) -> str:
        """[O, codes] of [O, words], float32."""
        shifts = b.constant(range(0, WORD_BITS, bits), "uint32")
        spread = b("BitShift", b.unsqueeze(b.cast(words, TensorProto.UINT32), 2), shifts, direction="RIGHT")
        return b.cast(b("BitwiseAnd", spread, b.constant((1 << bits) - 1, "uint32")), FLOAT)

    zero: str | float = float(zero_code)
    if _has(node, "zero_points"):
        of_rows = b.reshape(codes("zero_points"), dims["O"], -1)
        zero = b.unsqueeze(b("Slice", of_rows, [0], [dims["IS"]], [1]), 2)
    blocks = b.reshape(codes("blocks"), dims["O"], dims["IS"], block)
    weight = b("Mul", b("Sub", blocks, zero), b.unsqueeze(b.cast("scales", FLOAT), 2))
    if _has(node, "offsets"):
        weight = b("Add", weight, b.unsqueeze(b.cast("offsets", FLOAT), 2))
    if dtype != FLOAT:
        weight = b.cast(b.cast(weight, dtype), FLOAT)
    turned = b("Transpose", b.reshape(weight, dims["O"], dims["I"]), perm=[1, 0])
    b.cast(b("MatMul", b.cast("input", FLOAT), turned), dtype, out="output")
    return b.function(MATMUL_NBITS, node, {"": opset}, "blocks")


def runtime_body(
    node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], imports: Mapping[str, int], domain: str
) -> onnx.FunctionProto:
    """The function of `node` around `domain`'s op, which reads bytes. Bytes of constants are computed once, when a session opens."""
    bits, block, zero = _form(node, dims)
    if _attributes(node)["super_block"]:
        return function_body(node, dtype, imports[""], dims)
    b = Scope()

    def bytes_of(words: str) -> str:
        """[O, bytes] of [O, words]."""
        spread = b(
            "BitShift",
            b.unsqueeze(b.cast(words, TensorProto.UINT32), 2),
            b.constant((0, 8, 16, 24), "uint32"),
            direction="RIGHT",
        )
        return b.reshape(b.cast(b("BitwiseAnd", spread, b.constant(255, "uint32")), TensorProto.UINT8), dims["O"], -1)

    blocks = b.reshape(bytes_of("blocks"), dims["O"], dims["IS"], block * bits // 8)
    inputs = ["input", blocks, "scales"]
    if _has(node, "zero_points"):
        inputs.append(b("Slice", bytes_of("zero_points"), [0], [-(-dims["IS"] * bits // 8)], [1]))
    attributes: dict[str, Any] = {"K": dims["I"], "N": dims["O"], "bits": bits, "block_size": block}
    if dtype == FLOAT:
        attributes["accuracy_level"] = ROUNDED
    moved = 0 if _has(node, "zero_points") else (1 << (bits - 1)) - zero  # the domain's op has zero in the middle
    offsets = b.cast("offsets", FLOAT) if _has(node, "offsets") else ""
    if moved:
        middles = b("Mul", b.cast("scales", FLOAT), float(moved))
        offsets = b("Add", offsets, middles) if offsets else middles
    if offsets:
        product = b("MatMulNBits", *inputs, domain=domain, **attributes)
        sums = b("ReduceSum", b.reshape(b.cast("input", FLOAT), 0, 0, dims["IS"], block), [3], keepdims=0)
        thin = b("MatMul", sums, b("Transpose", offsets, perm=[1, 0]))
        b("CastLike", b("Add", b.cast(product, FLOAT), thin), "scales", out="output")
    else:
        b("MatMulNBits", *inputs, out="output", domain=domain, **attributes)
    return b.function(MATMUL_NBITS, node, imports, "blocks")


def _form(node: onnx.NodeProto, dims: Mapping[str, int]) -> tuple[int, int, int]:
    """Bits, block size, and the code of 0 without zero points."""
    bits, block, zero, super_block = _attributes(node).values()
    if super_block:
        words, numbers = (WORDS[bits], NUMBERS[bits]) if (bits, block) in ((4, 32), (6, 16)) else (0, 0)
        supers = dims["I"] // SUPER
        fit = super_block == SUPER and dims["I"] % SUPER == 0 and dims["O"] % TILE == 0
        if not fit or not words or (dims["IW"], dims["IS"]) != (supers * words, supers * numbers):
            raise UnsupportedError(
                f"{node.name or node.op_type}: {bits} bits in blocks of {block} with super_block={super_block}, {dims['IW']} words and "
                f"{dims['IS']} scales for {dims['I']} inputs and {dims['O']} outputs have no body."
            )
        return bits, block, zero
    if bits not in (4, 8) or dims["IW"] * WORD_BITS != dims["I"] * bits or dims["IS"] * block != dims["I"]:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {bits} bits in blocks of {block}, {dims['IW']} words and {dims['IS']} scales for "
            f"{dims['I']} inputs have no body."
        )
    return bits, block, 1 << (bits - 1) if zero < 0 else zero


def _attributes(node: onnx.NodeProto) -> dict[str, int]:
    set_ = {a.name: a.i for a in node.attribute}
    return {spec.name: int(set_.get(spec.name, spec.default)) for spec in MATMUL_NBITS.attributes}


def fields(b: Scope, words: str, shifts: Sequence[int], size: int) -> str:
    """float32 numbers of `size` bits at `shifts` of each uint32 word, in a new last dimension."""
    spread = b("BitShift", b.unsqueeze(words, -1), b.constant(shifts, "uint32"), direction="RIGHT")
    return b.cast(b("BitwiseAnd", spread, b.constant((1 << size) - 1, "uint32")), FLOAT)


def _super_blocks(b: Scope, bits: int, dims: Mapping[str, int]) -> str:
    """The transposed, dequantized weight of K-quants [I, O], float32."""
    tiles, supers = dims["O"] // TILE, dims["I"] // SUPER
    blocks = SUPER // (32 if bits == 4 else 16)

    def part(value: str, axis: int, begin: int, end: int) -> str:
        return b("Slice", value, [begin], [end], [axis])

    packed = b.reshape(b.cast("blocks", TensorProto.UINT32), tiles, supers, -1)  # words of TILE outputs
    whole = b.reshape(fields(b, part(packed, 2, 0, 32), (0, 8, 16, 24), 8), tiles, supers, 16, TILE)
    numbers = b.reshape(b.cast("scales", FLOAT), tiles, supers, -1, TILE)
    words = part(packed, 2, 32, TILE * WORDS[bits])
    if bits == 4:
        steps = b("Mul", part(whole, 2, 0, 8), part(numbers, 2, 0, 1))
        least = b("Mul", part(whole, 2, 8, 16), part(numbers, 2, 1, 2))
        codes = fields(
            b, b.reshape(words, tiles, supers, blocks, 4, TILE), LOW_BITS, 4
        )  # [tiles, supers, blocks, 4, TILE, 8]
    else:
        signed = b("Sub", whole, b("Mul", b.cast(b("Greater", whole, 127.0), FLOAT), 256.0))
        steps, least = b("Mul", signed, numbers), ""
        words = b.reshape(words, tiles, supers, blocks, 3, TILE)
        first = b("Transpose", fields(b, part(words, 3, 0, 2), LOW_BITS, 4), perm=[0, 1, 2, 4, 3, 5])
        high = fields(b, part(words, 3, 2, 3), HIGH_BITS, 2)
        shape = (tiles, supers, blocks, 1, TILE, 16)
        codes = b("Add", b.reshape(first, *shape), b("Mul", b.reshape(high, *shape), 4.0 * 4.0))
        codes = b("Sub", codes, 32.0)
    weight = b("Mul", codes, b.unsqueeze(b.unsqueeze(steps, 3), 5))
    if least:
        weight = b("Sub", weight, b.unsqueeze(b.unsqueeze(least, 3), 5))
    return b.reshape(b("Transpose", weight, perm=[1, 2, 3, 5, 0, 4]), dims["I"], dims["O"])


def _has(node: onnx.NodeProto, name: str) -> bool:
    return bool(dict(zip(MATMUL_NBITS.input_names(), node.input, strict=False)).get(name))


BODY = Body(function_body, ("I", "O", "IW", "IS"), runtime=runtime_body)
