"""Function bodies of still::CausalConv: in standard ops, and around CausalConvWithState, which ai.onnx has since opset 27 and ONNX Runtime
has in its own domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import Body, Scope
from still_graphs.functions.counts import checked_new_tokens
from still_kernels.causal_conv.spec import CAUSAL_CONV


@dataclass(frozen=True)
class Layer:
    """Taps, activation and presence of a bias."""

    taps: int
    activation: str
    bias: bool

    @classmethod
    def of(cls, node: onnx.NodeProto, dims: Mapping[str, int]) -> Layer:
        """The layer of a node.

        Raises:
            UnsupportedError: No body supports its state or activation.
        """
        name, taps, past = node.name or node.op_type, dims["K"], dims["P"]
        if taps != past + 1 or taps < 2:
            raise UnsupportedError(f"{name}: {taps} taps with {past} columns of state; expected one less.")
        activation = {a.name: a.s.decode() for a in node.attribute}.get("activation", "none")
        if activation not in CAUSAL_CONV.attribute("activation").choices:
            raise UnsupportedError(f"{name}: activation={activation!r} has no body.")
        inputs = dict(zip(CAUSAL_CONV.input_names(), node.input, strict=False))
        return cls(taps, activation, bool(inputs["bias"]))

    def known(self, b: Scope, past: str, tokens: str) -> str:
        """Columns of the state `past`, then new `tokens` [B, T, C], [B, K - 1 + T, C].

        Padding is arbitrary: it comes after all tokens, where neither outputs nor the state read it.
        """
        return b("Concat", b("Transpose", past, perm=[0, 2, 1]), tokens, axis=1)

    def latest(self, b: Scope, known: str, new: str) -> str:
        """The K - 1 columns of `known` that end with each row's last token, [B, C, K - 1]."""
        place = b.unsqueeze(b("Add", new, b.arange(self.taps - 1)), 2)
        return b("Transpose", b("GatherND", known, place, batch_dims=1), perm=[0, 2, 1])


def fused_body(
    node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], imports: Mapping[str, int], domain: str
) -> onnx.FunctionProto:
    """The function of `node` around `domain`'s op, in float32, the only type with a CPU kernel in ONNX Runtime.

    The op has no row lengths, and its state includes the padding. The state is used for full rows and gathered for others.
    """
    layer = Layer.of(node, dims)
    b = Scope()

    tokens = b.dim("input", 1)
    new = checked_new_tokens(b, tokens)  # [B, 1]
    x, past = b.wide("input", dtype), b.wide("past_conv_state", dtype)
    output, full = b.multi(
        "CausalConvWithState",
        b("Transpose", x, perm=[0, 2, 1]),
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
    # Reading the op's state as well orders the write to the state after the op, since they may share a buffer.
    whole = b.unsqueeze(b("Equal", new, tokens), 2)
    state = b("Where", whole, full, layer.latest(b, layer.known(b, past, x), new))
    b.cast(state, dtype, out="present_conv_state")
    return b.function(CAUSAL_CONV, node, imports)


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: a sum over shifted tokens, one for each tap. The state is gathered from past and new tokens."""
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
