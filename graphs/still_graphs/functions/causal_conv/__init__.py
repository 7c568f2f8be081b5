"""Function body of still::CausalConv."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Scope
from still_graphs.functions.counts import checked_new_tokens
from still_graphs.ops.causal_conv import CAUSAL_CONV

SYMBOLS = ("C", "K", "P")
"""Dimensions that the body is written for."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: a sum over the taps of shifted tokens; the state is gathered from past and new tokens together."""
    taps, past = dims["K"], dims["P"]
    if taps != past + 1 or taps < 2:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {taps} taps with {past} columns of state; expected one less."
        )
    activation = {a.name: a.s.decode() for a in node.attribute}.get("activation", "none")
    if activation not in CAUSAL_CONV.attribute("activation").choices:
        raise UnsupportedError(f"{node.name or node.op_type}: activation={activation!r} has no body.")
    given = dict(zip(CAUSAL_CONV.input_names(), node.input, strict=False))
    b = Scope()

    def wide(x: str) -> str:
        return x if dtype == FLOAT else b.cast(x, FLOAT)

    tokens = b.dim("input", 1)
    new = checked_new_tokens(b, tokens)  # [B, 1]
    real = b.unsqueeze(b("Less", b.arange(tokens), new), 2)  # [B, T, 1]
    fresh = b("Where", real, wide("input"), 0.0)
    known = b("Concat", b("Transpose", wide("past_conv_state"), perm=[0, 2, 1]), fresh, axis=1)  # [B, P + T, C]
    weight = b("Transpose", wide("weight"), perm=[1, 2, 0])  # [1, K, C]
    total = wide("bias") if given["bias"] else None
    for tap in range(taps):
        shifted = b("Slice", known, [tap], b("Add", tokens, [tap]), [1])
        term = b("Mul", shifted, b("Slice", weight, [tap], [tap + 1], [1]))
        total = term if total is None else b("Add", total, term)
    assert total is not None
    if activation == "silu":
        total = b("Mul", total, b("Sigmoid", total))
    masked = b("Where", real, total, 0.0, out="output" if dtype == FLOAT else None)
    if dtype != FLOAT:
        b.cast(masked, dtype, out="output")
    place = b.unsqueeze(b("Add", new, b.arange(past)), 2)  # [B, P, 1]
    latest = b("Transpose", b("GatherND", known, place, batch_dims=1), perm=[0, 2, 1])
    b.cast(latest, dtype, out="present_conv_state")
    if not given["bias"]:
        b("Clip", "new_tokens", "bias", None)  # a function derives its inputs from their uses; nobody reads this one
    return helper.make_function(
        node.domain,
        node.op_type,
        list(CAUSAL_CONV.input_names()),
        list(CAUSAL_CONV.output_names()),
        b.nodes,
        [helper.make_opsetid("", opset)],
        [],
    )
