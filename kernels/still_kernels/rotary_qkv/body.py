"""Function bodies of still::RotaryQkv: rotation and gate in float32; and around ONNX's RotaryEmbedding, for which ONNX Runtime has
kernels."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.functions.builder import Body, Scope
from still_kernels.rotary_qkv.spec import ROTARY_QKV


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b, wide, half = Scope(), TensorProto.FLOAT, dims["D"] // 2
    widths = _widths(node)
    parts = _parts(b, node, widths)
    angles = [b("Unsqueeze", b.cast(name, wide), [2]) for name in ("cos", "sin")]
    for part, name, width in zip(parts, ("query", "key"), widths, strict=False):
        x = b("Reshape", b.cast(part, wide), [0, 0, width // dims["D"], dims["D"]])
        first, second = b("Slice", x, [0], [half], [3]), b("Slice", x, [half], [2 * half], [3])
        turned = b("Concat", b("Neg", second), first, axis=3)
        rotated = b("Add", b("Mul", x, angles[0]), b("Mul", turned, angles[1]))
        b("Reshape", b.cast(rotated, dtype), [0, 0, width], out=name)
    b("Identity", parts[2], out="value")
    if len(parts) == 4:
        gate = b.cast(parts[3], wide)
        if any(node.input[3:4]):
            gate = b("Add", gate, b.cast("gate_bias", wide))
        b.cast(b("Sigmoid", gate), dtype, out="gate")
    return b.function(ROTARY_QKV, node, {"": opset}, "input")


def runtime_body(
    node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], imports: Mapping[str, int], domain: str
) -> onnx.FunctionProto:
    """The function of `node` by ONNX's op, which has half of the angles: both halves must be equal."""
    b, widths = Scope(), _widths(node)
    parts = _parts(b, node, widths)
    angles = [b.multi("Split", name, out=2, axis=-1, num_outputs=2)[0] for name in ("cos", "sin")]
    for part, name, width in zip(parts, ("query", "key"), widths, strict=False):
        b("RotaryEmbedding", part, *angles, out=name, num_heads=width // dims["D"])
    b("Identity", parts[2], out="value")
    if len(parts) == 4:
        gate = b("Add", parts[3], "gate_bias") if any(node.input[3:4]) else parts[3]
        b.cast(
            b("Sigmoid", b.cast(gate, TensorProto.FLOAT)), dtype, out="gate"
        )  # kernels round every step of a sigmoid
    return b.function(ROTARY_QKV, node, imports, "input")


def _widths(node: onnx.NodeProto) -> list[int]:
    values = {a.name: a.i for a in node.attribute}
    return [int(values.get(a.name, a.default)) for a in ROTARY_QKV.attributes]


def _parts(b: Scope, node: onnx.NodeProto, widths: list[int]) -> list[str]:
    """Query, key, value, and the gate if there is one."""
    own = any(node.input[4:])  # separate gate input
    sizes = [width for width in (widths[:3] if own else widths) if width]
    return [*b.multi("Split", "input", sizes, out=len(sizes), axis=-1), *(["gate_input"] if own else [])]


BODY = Body(function_body, ("D",), runtime=runtime_body)
