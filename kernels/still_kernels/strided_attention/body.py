"""Function body of still::StridedAttention."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import checked_counts
from still_kernels.attention.body import MASKED
from still_kernels.strided_attention.spec import STRIDED_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    size = {a.name: int(a.i) for a in node.attribute}.get("row_tokens", 16)
    if size < 1:
        raise UnsupportedError(f"{node.name or node.op_type}: row_tokens={size} must be at least 1.")
    heads, kv_heads, dim = dims["H"], dims["HK"], dims["D"]
    b = Scope()
    tokens = b.dim("query", 1)
    past, new = checked_counts(b, tokens)  # [B, 1]
    end, batch = b("Add", past, new), b.dim("past_length", 0)

    # Rows that T tokens may touch; those after the last one repeat it. A row without new tokens rewrites its value.
    touched = b("Div", b("Add", tokens, 2 * size - 2), size)
    last = b("Div", b("Sub", end, 1), size)
    row = b("Max", b("Min", b("Add", b("Div", past, size), b.arange(touched)), last), 0)  # [B, R]
    token = b("Sub", b("Min", b("Mul", b("Add", row, 1), size), end), b("Add", past, 1))
    has_tokens = b.unsqueeze(b("GreaterOrEqual", token, 0), 2, 3)
    source = b.unsqueeze(b("Max", token, 0), 2)
    lead = b.shape(batch, touched, kv_heads, 1)
    parts = (
        b.reshape(b.arange(batch), -1, 1, 1, 1),
        b.reshape(b.arange(kv_heads), 1, 1, -1, 1),
        b.unsqueeze(row, 2, 3),
    )
    index = b("Concat", *(b("Expand", part, lead) for part in parts), axis=3)  # [B, R, HK, 3]
    filled = b.unsqueeze(b("Max", b("ReduceMax", b("Div", b("Add", end, size - 1), size), keepdims=0), 1), 0)  # [1]
    rows, own = {}, {}
    for name in ("key", "value"):
        as_float = b.wide(name, dtype)
        # A call of no tokens has one to gather, which enters nothing.
        fresh = b("GatherND", b("Pad", as_float, [0, 0, 0, 0, 0, 1, 0, 0], 0.0), source, batch_dims=1)  # [B, R, HK, D]
        # Through float32 and back, which is exact: ONNX Runtime has no Where for bfloat16 on the CPU.
        chosen = b("Where", has_tokens, fresh, b.wide(b("GatherND", f"past_{name}", index), dtype))
        chosen = chosen if dtype == FLOAT else b.cast(chosen, dtype)
        present = b("ScatterND", f"past_{name}", index, chosen, out=f"present_{name}")
        rows[name] = b.wide(b("Slice", present, [0], filled, [2]), dtype)
        own[name] = b.unsqueeze(b("Transpose", as_float, perm=[0, 2, 1, 3]), 2)  # [B, HK, 1, T, D]
    scaled = b("Mul", b.wide("query", dtype), b.constant([dim**-0.5] * dim, "float32"))
    grouped = b("Reshape", b("Transpose", scaled, perm=[0, 2, 1, 3]), b.shape(0, kv_heads, heads // kv_heads, -1, dim))
    flat = b.reshape(grouped, 0, 0, -1, dim)  # [B, HK, G * T, D]
    apart = b.shape(0, kv_heads, heads // kv_heads, -1, filled)
    logits = b("Reshape", b("MatMul", flat, b("Transpose", rows["key"], perm=[0, 1, 3, 2])), apart)
    chunk = b.unsqueeze(b("Div", b("Add", past, b.arange(tokens)), size), 2)  # [B, T, 1]
    mask = b.unsqueeze(b("Where", b("Less", b.arange(filled), chunk), 0.0, MASKED), 1, 2)
    own_logits = b("ReduceSum", b("Mul", grouped, own["key"]), [-1], keepdims=1)
    weights = b("Softmax", b("Concat", b("Add", logits, mask), own_logits, axis=4), axis=-1)
    of_rows = b("Reshape", b("Slice", weights, [0], filled, [4]), b.shape(0, kv_heads, -1, filled))
    mixed = b("Reshape", b("MatMul", of_rows, rows["value"]), b("Shape", grouped))
    of_own = b("Slice", weights, filled, b("Add", filled, 1), [4])
    mixed = b("Add", mixed, b("Mul", of_own, own["value"]))
    mixed = b("Transpose", b.reshape(mixed, 0, heads, -1, dim), perm=[0, 2, 1, 3])
    real = b.unsqueeze(b("Less", b.arange(tokens), new), 2, 3)
    b.narrow(dtype, "output", "Where", real, mixed, 0.0)
    return b.function(STRIDED_ATTENTION, node, {"": opset})


BODY = Body(function_body, ("H", "HK", "D"))
