"""Function body of still::LocalLinearAttention: still::Attention with corrected values."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import BOOL, DOUBLE, FLOAT, INT64, Body, Scope
from still_kernels.attention.body import Queries, cached_body
from still_kernels.local_linear_attention.spec import LARGEST, LOCAL_LINEAR_ATTENTION, MOST, NEAR, fault_of

LEAST = 2.2250738585072014e-308
"""Least normal float64."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    present = {name for name, source in zip(LOCAL_LINEAR_ATTENTION.input_names(), node.input, strict=False) if source}
    if fault := fault_of(present):
        raise UnsupportedError(f"{node.name or node.op_type}: {fault}.")
    heads, kv_heads, dim = dims["H"], dims["HK"], dims["D"]
    exact = "ridge" in present

    def attend(b: Scope, queries: Queries) -> str:
        def wide(x: str) -> str:
            return b.cast(x, DOUBLE) if exact else b.wide(x, queries.dtype)

        def grouped(x: str) -> str:
            """[B, M, H, D] as [B, HK, G * M, D]."""
            return b.reshape(b("Transpose", x, perm=[0, 2, 1, 3]), 0, kv_heads, -1, dim)

        filled = b.unsqueeze(queries.filled, 0)
        key, value = (wide(b("Slice", f"present_{name}", [0], filled, [2])) for name in ("key", "value"))
        turned = b("Transpose", key, perm=[0, 1, 3, 2])
        of_heads = b.shape(0, heads, -1, filled)
        if exact:
            query = grouped(b.cast(b("GatherND", "query", queries.token, batch_dims=1), DOUBLE))
            products = b("Mul", b("MatMul", query, turned), b.constant(dim**-0.5, "float64"))
            logits = b("Add", b("Reshape", products, of_heads), b.cast(queries.mask, DOUBLE))  # [B, H, M, F]
        else:
            logits = b("Add", b("Reshape", b("MatMul", grouped(queries.query), turned), of_heads), queries.mask)
        weights = b("Reshape", b("Softmax", logits, axis=-1), b.shape(0, kv_heads, -1, filled))
        if exact:
            mean = b("MatMul", weights, key)
            total = b("ReduceLogSumExp", logits, [3], keepdims=1)  # [B, H, M, 1]
            added = b("Exp", b("Min", b("Neg", total), b.constant(LARGEST, "float64")))
            ridge = b("Mul", b.reshape(b.cast("ridge", DOUBLE), 1, heads, 1, 1), added)
            ridge = b.reshape(ridge, 0, kv_heads, -1, 1)
            right = _solved(b, (weights, key, turned, mean, ridge), b("Sub", mean, query))
        else:
            right = grouped(wide(b("GatherND", "correction", queries.token, batch_dims=1)))
        scores = b("MatMul", right, turned)
        scores = b("Sub", scores, b("ReduceSum", b("Mul", weights, scores), [-1], keepdims=1))
        one = b.constant(1.0, "float64" if exact else "float32")
        mixed = b("MatMul", b("Mul", weights, b("Sub", one, scores)), value)
        mixed = b("Transpose", b.reshape(mixed, 0, heads, -1, dim), perm=[0, 2, 1, 3])
        return b.cast(mixed, FLOAT) if exact else mixed

    return cached_body(LOCAL_LINEAR_ATTENTION, node, dtype, opset, dims, attend)


def _solved(b: Scope, system: tuple[str, str, str, str, str], right: str) -> str:
    """Like `solved` of still_kernels: weights, keys, transposed keys, means, ridge; each loop iteration is a step."""
    weights, key, turned, mean, ridge = system

    def product(s: Scope, x: str, y: str) -> str:
        return s("ReduceSum", s("Mul", x, y), [-1], keepdims=1)

    def least(s: Scope, x: str) -> str:
        return s("Max", x, s.constant(LEAST, "float64"))

    spread = b("Sub", b("MatMul", weights, b("Mul", key, key)), b("Mul", mean, mean))
    scale = b("Add", b("Relu", spread), ridge)
    start = b("Div", right, scale)
    first = product(b, right, start)
    enough = b("Mul", first, b.constant(NEAR, "float64"))
    turn = Scope(b)
    across = turn("Sub", turn("MatMul", "way", turned), product(turn, "way", mean))
    across = turn("Mul", weights, across)
    moved = turn("Sub", turn("MatMul", across, key), turn("Mul", turn("ReduceSum", across, [-1], keepdims=1), mean))
    moved = turn("Add", moved, turn("Mul", ridge, "way"))
    step = turn("Div", "size", least(turn, product(turn, "way", moved)))
    turn("Add", "x", turn("Mul", step, "way"), out="x_after")
    rest = turn("Sub", "rest", turn("Mul", step, moved), out="rest_after")
    near = turn("Div", rest, scale)
    size = turn("Identity", product(turn, rest, near), out="size_after")
    turn("Add", near, turn("Mul", turn("Div", size, least(turn, "size")), "way"), out="way_after")
    far = turn("ReduceMax", turn.cast(turn("Greater", size, enough), INT64), keepdims=0)
    turn("Greater", far, 0, out="goes_on")
    names = ("x", "rest", "way", "size")
    body = turn.graph(
        "of_one_step",
        [("goes_on", BOOL), *((f"{name}_after", DOUBLE) for name in names)],
        [("turn", INT64, []), ("go_on", BOOL, []), *((name, DOUBLE, None) for name in names)],
    )
    zero = b("Sub", right, right)
    found, *_, size = b.multi("Loop", MOST, True, zero, right, start, first, out=4, body=body)
    return b("Where", b("LessOrEqual", size, enough), found, b.constant(float("nan"), "float64"))


BODY = Body(function_body, ("H", "HK", "D"))
