"""Function body of still::CausalConv."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.causal_conv.fused import fused_body
from still_graphs.functions.causal_conv.layer import Layer
from still_graphs.functions.counts import checked_new_tokens
from still_graphs.ops.causal_conv import CAUSAL_CONV


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: a sum over the taps of shifted tokens; the state is gathered from past and new tokens together."""
    layer = Layer.of(node, dims)
    b = Scope()

    def wide(x: str) -> str:
        return x if dtype == FLOAT else b.cast(x, FLOAT)

    tokens = b.dim("input", 1)
    new = checked_new_tokens(b, tokens)  # [B, 1]
    known = layer.known(b, wide("past_conv_state"), wide("input"))
    weight = b("Transpose", wide("weight"), perm=[1, 2, 0])  # [1, K, C]
    total = wide("bias") if layer.bias else None
    for tap in range(layer.taps):
        shifted = b("Slice", known, [tap], b("Add", tokens, [tap]), [1])
        term = b("Mul", shifted, b("Slice", weight, [tap], [tap + 1], [1]))
        total = term if total is None else b("Add", total, term)
    assert total is not None
    if layer.activation == "silu":
        total = b("Mul", total, b("Sigmoid", total))
    real = b.unsqueeze(b("Less", b.arange(tokens), new), 2)  # [B, T, 1]
    masked = b("Where", real, total, 0.0, out="output" if dtype == FLOAT else None)
    if dtype != FLOAT:
        b.cast(masked, dtype, out="output")
    b.cast(layer.latest(b, known, new), dtype, out="present_conv_state")
    return b.function(CAUSAL_CONV, node, {"": opset})


BODY = Body(function_body, ("C", "K", "P"), fused=fused_body)
