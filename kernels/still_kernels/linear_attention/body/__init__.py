"""Function body of still::LinearAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import checked_new_tokens
from still_kernels.linear_attention.body.chunks import write_chunks
from still_kernels.linear_attention.body.fused import fused_body
from still_kernels.linear_attention.body.layer import Layer, Tensors, heads_first
from still_kernels.linear_attention.body.step import write_step
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: a call of one token by the recurrence, a longer one in chunks."""
    layer = Layer.of(node, dims)
    b = Scope()
    tokens = b.dim("query", 1)
    real = b("Less", b.arange(tokens), checked_new_tokens(b, tokens))  # [B, T]
    tensors = heads_first(b, layer, dtype, real)

    def branch(write: Callable[[Scope, Layer, Tensors, str, str], None], suffix: str) -> onnx.GraphProto:
        scope = Scope(b)
        names = f"output_{suffix}", f"present_{suffix}"
        write(scope, layer, tensors, *names)
        return scope.graph(suffix, [(name, FLOAT) for name in names])

    single = b("Equal", b("Squeeze", tokens), 1)
    wide = b.multi(
        "If",
        single,
        out=["output_wide", "present_recurrent_state"],
        then_branch=branch(write_step, "step"),
        else_branch=branch(write_chunks, "chunks"),
    )[0]  # [B, T, H, G, V]
    b.narrow(dtype, "output", "Where", b.unsqueeze(real, 2, 3, 4), wide, 0.0)
    return b.function(LINEAR_ATTENTION, node, {"": opset})


BODY = Body(function_body, ("HQ", "G", "HK", "D", "H", "V"), fused=fused_body)
