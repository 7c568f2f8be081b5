"""Function body of still::GatherNBits: unpacks the requested row from a group of eight interleaved rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_kernels.gather_nbits.spec import GATHER_NBITS
from still_kernels.matmul_nbits.body import HIGH_BITS, LOW_BITS, fields
from still_kernels.matmul_nbits.spec import NUMBERS, SUPER, TILE, WORDS

SCALES = 16
"""Bytes of scales in a block of 256 inputs: for Q4_K eight scales and eight offsets."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    bits = next((a.i for a in node.attribute), int(GATHER_NBITS.attribute("bits").default))
    words, numbers = WORDS.get(bits, 0), NUMBERS.get(bits, 0)
    supers = dims["IS"] // max(numbers, 1)
    if not words or dims["O"] % TILE or (dims["IW"], dims["IS"]) != (supers * words, supers * numbers):
        raise UnsupportedError(
            f"{node.name or node.op_type}: {bits} bits, {dims['IW']} words and {dims['IS']} scales of {dims['O']} rows have no body."
        )
    b = Scope()
    first = b("Div", "indices", TILE)
    lane = b("Sub", "indices", b("Mul", first, TILE))  # [B, T]
    rows = b("Add", b.unsqueeze(b("Mul", first, TILE), -1), b.constant(range(TILE)))

    def of_lane(values: str, place: str, count: int, nothing: str | float) -> str:
        """Values of [B, T, supers, n, count] at index `place` [B, T], [B, T, supers, n]."""
        here = b("Equal", b.unsqueeze(place, -1), b.constant(range(count)))
        chosen = b("Where", b.unsqueeze(here, 2, 3), values, nothing)
        return b("ReduceSum", chosen, [4], keepdims=0)

    def part(value: str, axis: int, begin: int, end: int) -> str:
        return b("Slice", value, [begin], [end], [axis])

    def unpacked(value: str, shifts: Sequence[int], size: int, *shape: int) -> str:
        return b.reshape(fields(b, value, shifts, size), 0, 0, *shape)

    none = b.constant(0, "int32")
    packed = b.reshape(b("Gather", "blocks", rows, axis=0), 0, 0, supers, words * TILE)
    # A byte for each of eight rows: two words for each scale.
    pairs = b.reshape(part(packed, 3, 0, SCALES * 2), 0, 0, supers, SCALES, 2)
    four = b("Div", lane, 4)
    word = b.cast(of_lane(pairs, four, 2, none), TensorProto.UINT32)
    shift = b.cast(b("Mul", b("Sub", lane, b("Mul", four, 4)), 8), TensorProto.UINT32)
    byte = b("BitShift", word, b.unsqueeze(shift, 2, 3), direction="RIGHT")
    whole = b.cast(b("BitwiseAnd", byte, b.constant(255, "uint32")), FLOAT)
    sizes = b.reshape(b.cast(b("Gather", "scales", rows, axis=0), FLOAT), 0, 0, supers, numbers, TILE)
    size = of_lane(sizes, lane, TILE, 0.0)
    blocks = 8 if bits == 4 else SCALES
    each = SUPER // blocks
    words_of = b.reshape(part(packed, 3, SCALES * 2, words * TILE), 0, 0, supers, words - SCALES // 4, TILE)
    codes = b.cast(of_lane(words_of, lane, TILE, none), TensorProto.UINT32)
    if bits == 4:
        steps = b("Mul", part(whole, 3, 0, blocks), part(size, 3, 0, 1))
        least = b.unsqueeze(b("Mul", part(whole, 3, blocks, SCALES), part(size, 3, 1, 2)), -1)
        values = unpacked(codes, LOW_BITS, 4, supers, blocks, each)
    else:
        signed = b("Sub", whole, b("Mul", b.cast(b("Greater", whole, 127.0), FLOAT), 256.0))
        steps, least = b("Mul", signed, size), ""
        codes = b.reshape(codes, 0, 0, supers, blocks, 3)
        low = unpacked(part(codes, 4, 0, 2), LOW_BITS, 4, supers, blocks, each)
        high = unpacked(part(codes, 4, 2, 3), HIGH_BITS, 2, supers, blocks, each)
        values = b("Sub", b("Add", low, b("Mul", high, 16.0)), 32.0)
    found = b("Mul", values, b.unsqueeze(steps, -1))
    if least:
        found = b("Sub", found, least)
    found = b.reshape(found, 0, 0, supers * SUPER, out="output" if dtype == FLOAT else None)
    if dtype != FLOAT:
        b.cast(found, dtype, out="output")
    return b.function(GATHER_NBITS, node, {"": opset}, "blocks")


BODY = Body(function_body, ("O", "IW", "IS"))
