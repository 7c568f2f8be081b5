"""Function bodies of still::LinearAttention: in standard ops, and around LinearAttention, which ai.onnx has since opset 27 and ONNX Runtime
has in its own domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import checked_new_tokens
from still_kernels.linear_attention.body.chunks import write_chunks
from still_kernels.linear_attention.body.layer import Layer, Tensors, heads_first, write_step
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: the recurrence for one token, chunks for longer calls."""
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


def fused_body(
    node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], imports: Mapping[str, int], domain: str
) -> onnx.FunctionProto:
    """The function of `node` around `domain`'s LinearAttention, in float32, the only type with a CPU kernel in ONNX Runtime.

    The op has no row lengths. Key, value, decay and beta are 0 at padding, which leaves the state unchanged bit for bit.
    """
    layer = Layer.of(node, dims)
    b = Scope()
    tokens = b.dim("query", 1)
    real = b("Less", b.arange(tokens), checked_new_tokens(b, tokens))  # [B, T]

    def masked(value: str, rank: int) -> str:
        """[B, T, ...] as [B, T, channels], 0 at padding."""
        return b.reshape(b("Where", b.unsqueeze(real, *range(2, rank)), value, 0.0), 0, 0, -1)

    query, key = b.wide("query", dtype), b.wide("key", dtype)
    if layer.query_groups < layer.heads:
        shape = b.shape(1, 1, 1, layer.heads // layer.query_groups, 1, 1)
        query = b("Expand", b.unsqueeze(query, 3), shape)
    if not domain and layer.key_heads < layer.heads:  # ai.onnx's op needs as many key heads as value heads
        key = b("Expand", b.unsqueeze(key, 3), b.shape(1, 1, 1, layer.heads // layer.key_heads, 1))
        key = b.reshape(key, 0, 0, layer.heads, layer.dim)
    output = b.multi(
        "LinearAttention",
        b.reshape(query, 0, 0, -1),
        masked(key, 4),
        masked(b.wide("value", dtype), 4),
        "past_recurrent_state",
        masked("decay", 4) if layer.decay else None,
        masked("beta", 3) if layer.beta else None,
        out=[b.fresh("attended"), "present_recurrent_state"],
        domain=domain,
        q_num_heads=layer.heads * layer.shared,
        kv_num_heads=layer.heads,
        update_rule=layer.rule,
        scale=layer.factor,
    )[0]
    by_head = b.reshape(output, 0, 0, layer.heads, layer.shared, layer.size)
    b.narrow(dtype, "output", "Where", b.unsqueeze(real, 2, 3, 4), by_head, 0.0)
    return b.function(LINEAR_ATTENTION, node, imports)


BODY = Body(function_body, ("HQ", "G", "HK", "D", "H", "V"), fused=fused_body)
