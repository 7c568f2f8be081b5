"""Properties of a still::LinearAttention node, its inputs by head, and a call of one token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from still_graphs.errors import UnsupportedError, unknown
from still_graphs.functions.builder import FLOAT, Scope
from still_kernels.linear_attention.spec import DELTA, GATED, LINEAR_ATTENTION


@dataclass(frozen=True)
class Layer:
    """Sizes by the OpSpec's symbols, and the rule; `decay` and `beta` are E and W, 0 if the rule has none."""

    rule: str
    query_groups: int
    shared: int
    key_heads: int
    dim: int
    heads: int
    size: int
    decay: int
    beta: int
    factor: float

    @classmethod
    def of(cls, node: onnx.NodeProto, dims: Mapping[str, int]) -> Layer:
        """The layer of a node.

        Raises:
            UnsupportedError: No body supports its rule, heads or gates.
        """
        name = node.name or node.op_type
        attributes = {a.name: a for a in node.attribute}
        rules = LINEAR_ATTENTION.attribute("update_rule")
        rule = attributes["update_rule"].s.decode() if "update_rule" in attributes else str(rules.default)
        if rule not in rules.choices:
            raise unknown(rule, rules.choices, f"{name}: update_rule={rule!r}", UnsupportedError)
        by_name = dict(zip(LINEAR_ATTENTION.input_names(), node.input, strict=False))
        for gate, takers in (("decay", GATED), ("beta", DELTA)):
            if bool(by_name[gate]) != (rule in takers):
                raise UnsupportedError(
                    f"{name}: update_rule={rule!r} {'needs' if rule in takers else 'takes no'} {gate}."
                )
        widths = {
            "decay": (dims.get("E", 0), (1, dims["D"]), GATED, "the last dimension of decay"),
            "beta": (dims.get("W", 0), (1, dims["H"]), DELTA, "heads of beta"),
        }
        for width, expected, takers, what in widths.values():
            if rule in takers and width not in expected:
                raise UnsupportedError(f"{name}: {width} {what}; expected {expected[0]} or {expected[1]}.")
        for what, count in (("query groups", dims["HQ"]), ("key heads", dims["HK"])):
            if dims["H"] % count:
                raise UnsupportedError(f"{name}: {count} {what} do not divide the {dims['H']} heads of value.")
        scale = attributes["scale"].f if "scale" in attributes else 0.0
        return cls(
            rule,
            dims["HQ"],
            dims["G"],
            dims["HK"],
            dims["D"],
            dims["H"],
            dims["V"],
            dims["E"] if rule in GATED else 0,
            dims["W"] if rule in DELTA else 0,
            scale or dims["D"] ** -0.5,
        )


@dataclass(frozen=True)
class Tensors:
    """float32 values, 0 at padding: query times scale [B, H, T, G, D], key, value, decay [B, H, T, ...], beta [B, 1 or H, T, 1]."""

    query: str
    key: str
    value: str
    decay: str | None
    beta: str | None


def heads_first(b: Scope, layer: Layer, dtype: int, real: str) -> Tensors:
    """The inputs for every head, 0 at padding (where `real` [B, T] is false)."""

    def masked(name: str, rank: int, wide: bool) -> str:
        x = b.cast(name, FLOAT) if wide and dtype != FLOAT else name
        return b("Where", b.unsqueeze(real, *range(2, rank)), x, 0.0)

    def of_heads(x: str, heads: int, *rest: int) -> str:
        """[B, h, T, ...] as [B, H, T, ...]; each input head serves neighbouring heads."""
        if heads == layer.heads:
            return x
        shape = b.shape(1, 1, layer.heads // heads, *[1] * (len(rest) + 1))
        return b.reshape(b("Expand", b.unsqueeze(x, 2), shape), 0, layer.heads, -1, *rest)

    query = b("Transpose", masked("query", 5, True), perm=[0, 2, 1, 3, 4])
    key = b("Transpose", masked("key", 4, True), perm=[0, 2, 1, 3])
    decay = beta = None
    if layer.decay:
        decay = b("Transpose", masked("decay", 4, False), perm=[0, 2, 1, 3])
    if layer.beta:
        beta = b.unsqueeze(b("Transpose", masked("beta", 3, False), perm=[0, 2, 1]), 3)
    return Tensors(
        of_heads(b("Mul", query, layer.factor), layer.query_groups, layer.shared, layer.dim),
        of_heads(key, layer.key_heads, layer.dim),
        b("Transpose", masked("value", 4, True), perm=[0, 2, 1, 3]),
        decay,
        beta,
    )


def write_step(
    b: Scope, layer: Layer, x: Tensors, output: str, present: str, state: str = "past_recurrent_state"
) -> None:
    """Write `output` [B, 1, H, G, V] and the state `present` after the token, from `state`.

    In place: the sum that writes the present state is the last reader of the past one.
    """
    key = b("Transpose", x.key, perm=[0, 1, 3, 2])  # [B, H, D, 1]
    if x.decay is not None:
        state = b("Mul", state, b("Transpose", b("Exp", x.decay), perm=[0, 1, 3, 2]))
    update = x.value  # [B, H, 1, V]
    if x.beta is not None:
        update = b("Mul", x.beta, b("Sub", update, b("MatMul", x.key, state)))
    b("Add", state, b("Mul", key, update), out=present)
    query = b.reshape(x.query, 0, layer.heads, layer.shared, layer.dim)
    b("Unsqueeze", b("MatMul", query, present), [1], out=output)
