"""Function body of still::RotaryQkv: rotation and gate in float32."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.functions.builder import Scope
from still_graphs.ops.rotary_qkv import ROTARY_QKV
from still_graphs.passes.walk import attribute

SYMBOLS = ("D",)


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`; arguments as of `still_graphs.functions.function_body`."""
    b, wide, half = Scope(), TensorProto.FLOAT, dims["D"] // 2
    widths = [int(attribute(node, a.name, a.default)) for a in ROTARY_QKV.attributes]
    parts = b.multi("Split", "input", [w for w in widths if w], out=sum(w > 0 for w in widths), axis=-1)
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
        if any(node.input[3:]):
            gate = b("Add", gate, b.cast("gate_bias", wide))
        b.cast(b("Sigmoid", gate), dtype, out="gate")
    return b.function(ROTARY_QKV, node, {"": opset}, "input")
