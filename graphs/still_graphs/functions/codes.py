"""Wrap a body over numeric keys and values: rows come in and go out in 8 bits (`still_graphs.spec.CACHE`).

All rows are unpacked and packed at every call, which is for every runtime and is not fast; kernels read and write the rows that they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import TensorProto

from still_graphs.functions.builder import FLOAT, Scope
from still_graphs.ops import OPS
from still_graphs.spec import CACHE, CODES, scales_of

STEPS = 127
MIDDLE = 128
"""Makes a code an unsigned byte."""


def has_codes(node: onnx.NodeProto) -> bool:
    return any(a.name == CACHE.name and a.s == b"int8" for a in node.attribute)


def without_scales(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node as a body over numbers sees it; scales are last among inputs and outputs."""
    spec, plain = OPS[node.op_type], onnx.NodeProto()
    plain.CopyFrom(node)
    count = sum(not state.of_codes for state in spec.states)
    del plain.input[len(spec.inputs) + count :]
    del plain.output[len(spec.outputs) + count :]
    return plain


def unpack(b: Scope, words: str, scale: str, dim: int, dtype: int, out: str) -> None:
    """Words [..., D / 4] and scales [...] as numbers [..., D]."""
    shifts = b.constant([8 * i for i in range(CODES)], "uint32")
    bytes_ = b(
        "BitwiseXor",
        b.cast(words, TensorProto.UINT32),
        b.constant(sum(MIDDLE << 8 * i for i in range(CODES)), "uint32"),
    )
    spread = b("BitShift", b("Unsqueeze", bytes_, [-1]), shifts, direction="RIGHT")
    codes = b("Sub", b.cast(b("BitwiseAnd", spread, b.constant(255, "uint32")), FLOAT), float(MIDDLE))
    numbers = b("Mul", b.reshape(codes, 0, 0, 0, dim), b("Unsqueeze", scale, [-1]))
    if dtype == FLOAT:
        b("Identity", numbers, out=out)
    else:
        b.cast(numbers, dtype, out=out)


def codes_of(b: Scope, wide: str) -> tuple[str, str]:
    """Codes [..., D] and scales [..., 1] of rows, all float32."""
    scales = b("Div", b("ReduceMax", b("Abs", wide), [-1], keepdims=1), float(STEPS))
    return b("Round", b("Div", wide, b("Where", b("Greater", scales, 0.0), scales, 1.0))), scales


def pack(b: Scope, numbers: str, dim: int, dtype: int, words: str, scale: str) -> None:
    """The inverse, by the rule of `CACHE`. Shapes are said, as ONNX Runtime 1.31 reduces no dimension where there are no rows."""
    rows = b("Shape", numbers, start=0, end=-1)
    codes, scales = codes_of(b, numbers if dtype == FLOAT else b.cast(numbers, FLOAT))
    # The last byte of a word has its sign.
    codes = b.reshape(codes, 0, 0, 0, dim // CODES, CODES)
    unsigned = b(
        "Where", b("Less", codes, b.constant([0.0] * (CODES - 1) + [-2.0 * MIDDLE], "float32")), 2.0 * MIDDLE, 0.0
    )
    whole = b("Mul", b.cast(b("Add", codes, unsigned), TensorProto.INT64), [1 << 8 * i for i in range(CODES)])
    shape = b("Concat", rows, [dim // CODES], axis=0)
    b.cast(b("Reshape", b("ReduceSum", whole, [-1], keepdims=0), shape, allowzero=1), TensorProto.INT32, out=words)
    b("Reshape", scales, rows, out=scale, allowzero=1)


def keep_codes(function: onnx.FunctionProto, node: onnx.NodeProto, dtype: int, dim: int) -> None:
    """Make the narrow states come in and go out as words and scales."""
    states = [s for s in OPS[node.op_type].states if s.narrow]
    before, after = Scope(prefix="unpacked_"), Scope(prefix="packed_")
    names: dict[str, str] = {}
    for state in states:
        past, present = f"past_{state.name}", f"present_{state.name}"
        names |= {past: f"{past}_numbers", present: f"{present}_numbers"}
    rename(function.node, names)
    for state in states:
        past, present, scale = f"past_{state.name}", f"present_{state.name}", scales_of(state).name
        unpack(before, past, f"past_{scale}", dim, dtype, names[past])
        pack(after, names[present], dim, dtype, present, f"present_{scale}")
        function.input.append(f"past_{scale}")
        function.output.append(f"present_{scale}")
    nodes = [*before.nodes, *function.node, *after.nodes]
    del function.node[:]
    function.node.extend(nodes)


def rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename values, including those in subgraphs."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                rename(attribute.g.node, names)
                for output in attribute.g.output:
                    output.name = names.get(output.name, output.name)
