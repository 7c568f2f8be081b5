"""The body of still::CausalConv around CausalConvWithState, which ai.onnx has since opset 27, and ONNX Runtime in its own domain."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.functions.builder import Scope
from still_graphs.functions.causal_conv.layer import Layer
from still_graphs.functions.counts import checked_new_tokens
from still_graphs.ops.causal_conv import CAUSAL_CONV


def fused_body(
    node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], imports: Mapping[str, int], domain: str
) -> onnx.FunctionProto:
    """The function of `node` around `domain`'s op, in float32, which alone ONNX Runtime has a kernel for on the CPU.

    The op has no lengths of rows, and its state is that behind the padding: it is taken for full rows, and gathered for others.
    """
    layer = Layer.of(node, dims)
    b = Scope()

    tokens = b.dim("input", 1)
    new = checked_new_tokens(b, tokens)  # [B, 1]
    given, past = b.wide("input", dtype), b.wide("past_conv_state", dtype)
    output, full = b.multi(
        "CausalConvWithState",
        b("Transpose", given, perm=[0, 2, 1]),
        b.wide("weight", dtype),
        b.wide("bias", dtype) if layer.bias else None,
        past,
        out=[b.fresh("convolved"), b.fresh("state")],
        domain=domain,
        activation=layer.activation,
    )
    real = b.unsqueeze(b("Less", b.arange(tokens), new), 2)  # [B, T, 1]
    by_token = b("Transpose", output, perm=[0, 2, 1])
    b.narrow(dtype, "output", "Where", real, by_token, 0.0)
    # Reading the op's state, too, orders what writes the state behind the op that reads it: they may be one buffer.
    whole = b.unsqueeze(b("Equal", new, tokens), 2)
    state = b("Where", whole, full, layer.latest(b, layer.known(b, past, given), new))
    b.cast(state, dtype, out="present_conv_state")
    return b.function(CAUSAL_CONV, node, imports)
