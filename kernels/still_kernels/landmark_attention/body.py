"""Function body of still::LandmarkAttention: that of still::Attention with other logits."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import Body, Scope
from still_kernels.attention.body import MASKED, Call, cached_body
from still_kernels.landmark_attention.spec import LANDMARK_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`."""
    size = {a.name: int(a.i) for a in node.attribute}.get("block_tokens", 51)
    if size < 2:
        raise UnsupportedError(f"{node.name or node.op_type}: block_tokens={size} must be at least 2.")
    heads, kept, dim = dims["H"], dims["HK"], dims["D"]

    def attend(b: Scope, call: Call) -> str:
        filled = b.unsqueeze(call.filled, 0)
        key, value = (b.wide(b("Slice", f"present_{name}", [0], filled, [2]), call.dtype) for name in ("key", "value"))
        query = b.reshape(b("Transpose", call.query, perm=[0, 2, 1, 3]), 0, kept, -1, dim)
        logits = b("Reshape", b("MatMul", query, b("Transpose", key, perm=[0, 1, 3, 2])), b.shape(0, heads, -1, filled))
        count = b("Div", b("Add", filled, size - 1), size)
        missing = b("Sub", b("Mul", count, size), filled)
        pads = b("Concat", [0] * 7, missing, axis=0)
        blocks = b("Reshape", b("Pad", logits, pads, 0.0), b.shape(0, 0, 0, -1, size))  # [B, H, M, blocks, size]
        tokens, landmark = b("Slice", blocks, [0], [size - 1], [4]), b("Slice", blocks, [size - 1], [size], [4])
        own = b("Equal", b.arange(count), b("Div", call.position, size))  # [B, M, blocks]
        shared = b("Add", b("Sub", tokens, b("ReduceLogSumExp", tokens, [4], keepdims=1)), landmark)
        chosen = b("Where", b.unsqueeze(own, 1, 4), tokens, shared)
        flat = b("Reshape", b("Pad", chosen, [0] * 9 + [1], MASKED), b.shape(0, 0, 0, -1))
        weights = b("Softmax", b("Add", b("Slice", flat, [0], filled, [3]), call.mask), axis=-1)
        mixed = b("MatMul", b("Reshape", weights, b.shape(0, kept, -1, filled)), value)
        return b("Transpose", b.reshape(mixed, 0, heads, -1, dim), perm=[0, 2, 1, 3])

    return cached_body(LANDMARK_ATTENTION, node, dtype, opset, dims, attend)


BODY = Body(function_body, ("H", "HK", "D"))
