"""Function body of still::LocalLinearAttention: that of still::Attention with corrected values."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import BOOL, FLOAT, INT64, Body, Scope
from still_kernels.attention.body import Call, cached_body
from still_kernels.local_linear_attention.spec import LARGEST, LOCAL_LINEAR_ATTENTION, fault_of

LEAST = 1.1754944e-38
"""The least normal float32."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`; arguments as of `still_graphs.functions.function_body`."""
    ridge_steps = {a.name: int(a.i) for a in node.attribute}.get("ridge_steps", 0)
    given = {name for name, held in zip(LOCAL_LINEAR_ATTENTION.input_names(), node.input, strict=False) if held}
    if fault := fault_of(given, ridge_steps):
        raise UnsupportedError(f"{node.name or node.op_type}: {fault}.")
    heads, kept, dim = dims["H"], dims["HK"], dims["D"]

    def attend(b: Scope, call: Call) -> str:
        filled = b.unsqueeze(call.filled, 0)
        key, value = (b.wide(b("Slice", f"present_{name}", [0], filled, [2]), call.dtype) for name in ("key", "value"))
        turned = b("Transpose", key, perm=[0, 1, 3, 2])

        def grouped(x: str) -> str:
            """[B, M, H, D] as [B, HK, G * M, D]."""
            return b.reshape(b("Transpose", x, perm=[0, 2, 1, 3]), 0, kept, -1, dim)

        query = grouped(call.query)
        of_heads = b.shape(0, heads, -1, filled)
        logits = b("Add", b("Reshape", b("MatMul", query, turned), of_heads), call.mask)  # [B, H, M, F]
        weights = b("Reshape", b("Softmax", logits, axis=-1), b.shape(0, kept, -1, filled))
        if "correction" in given:
            right = grouped(b.wide(b("GatherND", "correction", call.token, batch_dims=1), call.dtype))
        else:
            mean = b("MatMul", weights, key)
            total = b("ReduceLogSumExp", logits, [3], keepdims=1)  # [B, H, M, 1]
            added = b("Exp", b("Min", b("Neg", total), LARGEST))
            ridge = b.reshape(b("Mul", b.reshape("ridge", 1, heads, 1, 1), added), 0, kept, -1, 1)
            right = b("Sub", mean, b("Mul", query, b.constant(dim**0.5, "float32")))
            right = _solved(b, (weights, key, turned, mean, ridge), right, ridge_steps)
        scores = b("MatMul", right, turned)
        scores = b("Sub", scores, b("ReduceSum", b("Mul", weights, scores), [-1], keepdims=1))
        mixed = b("MatMul", b("Mul", weights, b("Sub", 1.0, scores)), value)
        return b("Transpose", b.reshape(mixed, 0, heads, -1, dim), perm=[0, 2, 1, 3])

    return cached_body(LOCAL_LINEAR_ATTENTION, node, dtype, opset, dims, attend)


def _solved(b: Scope, given: tuple[str, str, str, str, str], right: str, ridge_steps: int) -> str:
    """As `solved` of still_kernels: weights, keys, keys turned, means, ridge; a turn of the loop is a step."""
    weights, key, turned, mean, ridge = given

    def product(s: Scope, x: str, y: str) -> str:
        return s("ReduceSum", s("Mul", x, y), [-1], keepdims=1)

    spread = b("Sub", b("MatMul", weights, b("Mul", key, key)), b("Mul", mean, mean))
    scale = b("Add", b("Relu", spread), ridge)
    start = b("Div", right, scale)
    turn = Scope(b)
    across = turn("Sub", turn("MatMul", "way", turned), product(turn, "way", mean))
    across = turn("Mul", weights, across)
    moved = turn("Sub", turn("MatMul", across, key), turn("Mul", turn("ReduceSum", across, [-1], keepdims=1), mean))
    moved = turn("Add", moved, turn("Mul", ridge, "way"))
    step = turn("Div", "size", turn("Max", product(turn, "way", moved), LEAST))
    turn("Add", "x", turn("Mul", step, "way"), out="x_after")
    rest = turn("Sub", "rest", turn("Mul", step, moved), out="rest_after")
    near = turn("Div", rest, scale)
    size = turn("Identity", product(turn, rest, near), out="size_after")
    turn("Add", near, turn("Mul", turn("Div", size, turn("Max", "size", LEAST)), "way"), out="way_after")
    turn("Identity", "go_on", out="goes_on")
    names = ("x", "rest", "way", "size")
    body = turn.graph(
        "of_one_step",
        [("goes_on", BOOL), *((f"{name}_after", FLOAT) for name in names)],
        [("turn", INT64, []), ("go_on", BOOL, []), *((name, FLOAT, None) for name in names)],
    )
    zero = b("Mul", right, 0.0)
    return b.multi("Loop", ridge_steps, True, zero, right, start, product(b, right, start), out=4, body=body)[0]


BODY = Body(function_body, ("H", "HK", "D"))
