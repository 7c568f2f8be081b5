"""Function body of still::AngleSum."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from still_graphs.functions.builder import FLOAT, INT64, Body, Scope
from still_graphs.functions.counts import checked_new_tokens
from still_kernels.angle_sum.spec import ANGLE_SUM, TURN


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b = Scope()
    tokens = b.dim("angle", 1)
    new = checked_new_tokens(b, tokens)  # [B, 1]
    real = b.unsqueeze(b("Less", b.arange(tokens), new), 2, 3)
    angle = "angle" if dtype == FLOAT else b.cast("angle", FLOAT)
    turned = b("Mul", b("Mul", b.unsqueeze(b("Tanh", angle), 2), 0.5), b.unsqueeze("step", 3))  # [B, T, H, A]
    whole = b.cast(b("Round", b("Mul", b("Where", real, turned, 0.0), float(TURN))), INT64)
    before = b.cast(b("Round", b("Mul", _places(b), TURN / (2 * math.pi))), INT64)
    # The state precedes the tokens, so that an empty call also has a last token.
    places = b("CumSum", b("Concat", b.unsqueeze(before, 1), whole, axis=1), 1)
    angles = b("Mul", b("Mul", b.cast(b("Mod", places, TURN), FLOAT), 1.0 / TURN), 2 * math.pi)
    last = b("Slice", angles, [-1], [1 << 62], [1])
    last = b.reshape(b("Transpose", last, perm=[0, 2, 3, 1]), 0, 0, 0, 1)
    after = b("Concat", b("Sub", b("Cos", last), 1.0), b("Sin", last), axis=3)
    b("Where", b.unsqueeze(b("Greater", new, 0), 2, 3), after, "past_angle_state", out="present_angle_state")
    b("Where", real, b("Slice", angles, [1], [1 << 62], [1]), 0.0, out="output")
    return b.function(ANGLE_SUM, node, {"": opset})


def _places(b: Scope) -> str:
    """The current angles, [B, H, A], from their cosines and sines, by the smaller of the two ratios."""
    cos = b("Add", b("Squeeze", b("Slice", "past_angle_state", [0], [1], [3]), [3]), 1.0)
    sin = b("Squeeze", b("Slice", "past_angle_state", [1], [2], [3]), [3])
    flat = b("GreaterOrEqual", b("Abs", cos), b("Abs", sin))
    near = b("Atan", b("Div", b("Where", flat, sin, cos), b("Where", flat, cos, sin)))
    behind = b("Where", b("Less", cos, 0.0), math.pi, 0.0)
    return b("Where", flat, b("Add", near, behind), b("Sub", b("Mul", b("Sign", sin), math.pi / 2), near))


BODY = Body(function_body)
