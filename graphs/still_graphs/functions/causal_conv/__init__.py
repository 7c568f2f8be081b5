"""Function body of still::CausalConv."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.functions.builder import Body, Scope
from still_graphs.functions.causal_conv.fused import fused_body
from still_graphs.functions.causal_conv.layer import Layer
from still_graphs.functions.counts import checked_new_tokens
from still_graphs.ops.causal_conv import CAUSAL_CONV


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: a sum over the taps of shifted tokens; the state is gathered from past and new tokens together."""
    layer = Layer.of(node, dims)
    b = Scope()

    tokens = b.dim("input", 1)
    new = checked_new_tokens(b, tokens)  # [B, 1]
    known = layer.known(b, b.wide("past_conv_state", dtype), b.wide("input", dtype))
    weight = b("Transpose", b.wide("weight", dtype), perm=[1, 2, 0])  # [1, K, C]
    total = b.wide("bias", dtype) if layer.bias else None
    for tap in range(layer.taps):
        shifted = b("Slice", known, [tap], b("Add", tokens, [tap]), [1])
        term = b("Mul", shifted, b("Slice", weight, [tap], [tap + 1], [1]))
        total = term if total is None else b("Add", total, term)
    assert total is not None
    if layer.activation == "silu":
        total = b("Mul", total, b("Sigmoid", total))
    real = b.unsqueeze(b("Less", b.arange(tokens), new), 2)  # [B, T, 1]
    b.narrow(dtype, "output", "Where", real, total, 0.0)
    b.cast(layer.latest(b, known, new), dtype, out="present_conv_state")
    return b.function(CAUSAL_CONV, node, {"": opset})


BODY = Body(function_body, ("C", "K", "P"), fused=fused_body)
