"""What the bodies of still::CausalConv are written for, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import Scope
from still_graphs.ops.causal_conv import CAUSAL_CONV


@dataclass(frozen=True)
class Layer:
    """Taps, activation, whether there is a bias."""

    taps: int
    activation: str
    bias: bool

    @classmethod
    def of(cls, node: onnx.NodeProto, dims: Mapping[str, int]) -> Layer:
        """The layer of a node.

        Raises:
            UnsupportedError: Its state or activation is none that a body is written for.
        """
        name, taps, past = node.name or node.op_type, dims["K"], dims["P"]
        if taps != past + 1 or taps < 2:
            raise UnsupportedError(f"{name}: {taps} taps with {past} columns of state; expected one less.")
        activation = {a.name: a.s.decode() for a in node.attribute}.get("activation", "none")
        if activation not in CAUSAL_CONV.attribute("activation").choices:
            raise UnsupportedError(f"{name}: activation={activation!r} has no body.")
        given = dict(zip(CAUSAL_CONV.input_names(), node.input, strict=False))
        return cls(taps, activation, bool(given["bias"]))

    def known(self, b: Scope, past: str, tokens: str) -> str:
        """Columns of the state `past` and new `tokens` [B, T, C] side by side, [B, K - 1 + T, C].

        Padding may hold anything: it stands behind all tokens, which no output of a token and no state reads.
        """
        return b("Concat", b("Transpose", past, perm=[0, 2, 1]), tokens, axis=1)

    def latest(self, b: Scope, known: str, new: str) -> str:
        """The K - 1 columns of `known` that end with each row's last token, [B, C, K - 1]."""
        place = b.unsqueeze(b("Add", new, b.arange(self.taps - 1)), 2)
        return b("Transpose", b("GatherND", known, place, batch_dims=1), perm=[0, 2, 1])
