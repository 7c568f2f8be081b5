"""Function body of still::ClusterTokens."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import checked_counts
from still_kernels.cluster_tokens.spec import CLUSTER_TOKENS


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`. Positions are compared as float32, which is exact up to 2^24."""
    window, heads = {a.name: int(a.i) for a in node.attribute}.get("cluster_window", 64), dims["HK"]
    if window < 1:
        raise UnsupportedError(f"{node.name or node.op_type}: cluster_window={window} must be at least 1.")
    b = Scope()
    tokens, batch = b.dim("cluster", 1), b.dim("past_length", 0)
    past, new = checked_counts(b, tokens)  # [B, 1]
    step = b.arange(tokens)
    last = b(
        "Min", step, b("Sub", new, 1)
    )  # padding repeats the last new token; rows without new tokens rewrite their value
    position = b("Max", b("Add", past, last), 0)  # [B, T]
    lead = b.shape(batch, tokens, heads, 1)
    parts = (
        b.reshape(b.arange(batch), -1, 1, 1, 1),
        b.reshape(b.arange(heads), 1, 1, -1, 1),
        b.unsqueeze(position, 2, 3),
    )
    index = b("Concat", *(b("Expand", part, lead) for part in parts), axis=3)  # [B, T, HK, 3]
    fresh = b("GatherND", b.cast("cluster", FLOAT), b.unsqueeze(b("Max", last, 0), 2), batch_dims=1)
    has_tokens = b.unsqueeze(b("Greater", new, 0), 2)
    fresh = b("Where", has_tokens, fresh, b("GatherND", "past_clusters", index))  # [B, T, HK]
    present = b("ScatterND", "past_clusters", index, fresh, out="present_clusters")
    filled = b.unsqueeze(b("Max", b("ReduceMax", b("Add", past, new), keepdims=0), 1), 0)
    seen = b("Slice", present, [0], filled, [2])
    own = b.unsqueeze(b("Transpose", fresh, perm=[0, 2, 1]), 3)  # [B, HK, T, 1]
    number = b.arange(filled)
    earlier = b.unsqueeze(b("Less", number, b.unsqueeze(position, 2)), 1)  # [B, 1, T, F]
    same = b("And", b("Equal", own, b.unsqueeze(seen, 2)), earlier)
    found, _ = b.multi("TopK", b("Where", same, b.cast(number, FLOAT), -1.0), b("Min", filled, window), out=2)
    found = b("Pad", found, b("Concat", [0] * 7, b("Sub", window, b("Min", filled, window)), axis=0), -1.0)
    alone = b("Less", b("Slice", found, [0], [1], [3]), 0.0)
    first = b("And", alone, b("Equal", b.arange(window), 0))
    found = b("Where", first, b.cast(b.unsqueeze(position, 1, 3), FLOAT), found)
    real = b.unsqueeze(b("Less", step, new), 1, 3)
    rising = b("Slice", b("Where", real, found, -1.0), [-1], [-(1 << 40)], [3], [-1])
    b.cast(b("Transpose", rising, perm=[0, 2, 1, 3]), onnx.TensorProto.INT32, out="blocks")
    return b.function(CLUSTER_TOKENS, node, {"": opset})


BODY = Body(function_body, ("HK",))
