"""Function bodies of still::MatMulNBits: the weight as numbers, then a product; and around ONNX Runtime's op of that name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import TensorProto

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.ops.matmul_nbits import MATMUL_NBITS

WORD_BITS = 32
ROUNDED = 4
"""The accuracy level of com.microsoft::MatMulNBits that rounds activations to 8 bits, the only fast one on CPUs."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`, which computes in float32 with the weight rounded to the activations' type, as kernels do."""
    bits, block, zero_code = _form(node, dims)
    b = Scope()

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
    """The function of `node` around `domain`'s op, which reads bytes: of constants they are made once, when a session is opened."""
    bits, block, zero = _form(node, dims)
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
    moved = 0 if _has(node, "zero_points") else (1 << (bits - 1)) - zero  # the domain's op has the middle for 0
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
    """Bits, block size and the code of 0 where there are no zero points."""
    set_ = {a.name: a.i for a in node.attribute}
    bits, block, zero = (int(set_.get(spec.name, spec.default)) for spec in MATMUL_NBITS.attributes)
    if bits not in (4, 8) or dims["IW"] * WORD_BITS != dims["I"] * bits or dims["IS"] * block != dims["I"]:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {bits} bits in blocks of {block}, {dims['IW']} words and {dims['IS']} scales for "
            f"{dims['I']} inputs have no body."
        )
    return bits, block, 1 << (bits - 1) if zero < 0 else zero


def _has(node: onnx.NodeProto, name: str) -> bool:
    return bool(dict(zip(MATMUL_NBITS.input_names(), node.input, strict=False)).get(name))


BODY = Body(function_body, ("I", "O", "IW", "IS"), runtime=runtime_body)
