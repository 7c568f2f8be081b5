"""Fuse products with what is around them: a norm before, a residual behind, and the products of a feed-forward layer with its gate.

TensorRT 8.6 compiles what lies between two plugins as a part of its own, a second each, and runs it in launches of its own; a decode step
of a small model is bound by launches. With these fused one part a layer is left.

requires: the products of sum_in_float32; RMSNormalization as ai.onnx has it since opset 23.
ensures: no norm of tokens [B, T, I] stands before one product alone; no sum of activations and a product, used once and without a
residual, is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.edits import is_weight, on_last, rank
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_graphs.ops.gated_mlp import GATED_MLP
from still_graphs.passes.fuse_gates import gated, halved
from still_graphs.patterns import Fusion, Match, Op, Val, fusing

NAMES = DENSE_MATMUL.input_names()
EPSILON = DENSE_MATMUL.attributes[0].name
NORM, RESIDUAL = NAMES.index("norm_weight"), NAMES.index("residual")


X, SCALE, OTHER = Val(), Val(is_weight), Val(lambda value: not is_weight(value))
NORMED = Op("RMSNormalization", X, SCALE)
OF_NORM = Op(DENSE_MATMUL.name, NORMED, ..., domain=DOMAIN)
PRODUCT = Op(DENSE_MATMUL.name, ..., domain=DOMAIN)
TOTAL = Op("Add", PRODUCT, OTHER)
GATE_UP, DOWN, WEIGHT = Val(), Val(), Val()
FIRST = Op(DENSE_MATMUL.name, X, GATE_UP, *[None] * (NORM - 2), WEIGHT, domain=DOMAIN)
GATED, SPLIT = gated(FIRST)
LAYER = Op(DENSE_MATMUL.name, GATED, DOWN, *[None] * (RESIDUAL - 2), X, domain=DOMAIN)


def _given(node: ir.Node, place: int) -> bool:
    return len(node.inputs) > place and node.inputs[place] is not None


def _takes_norm(match: Match) -> bool:
    kinds = {match.value(pattern).dtype for pattern in (X, SCALE, OF_NORM)}
    free = not _given(match.node(OF_NORM), NORM)
    return (
        free and rank(match.value(X)) == 3 and on_last(match.node(NORMED), -1) and len(kinds) == 1 and None not in kinds
    )


def _with_norm(match: Match) -> Sequence[ir.Value]:
    epsilon = match.node(NORMED).attributes.get_float("epsilon", 1e-5)
    inputs = {0: match.value(X), NORM: match.value(SCALE)}
    return _changed(match, match.node(OF_NORM), inputs, {EPSILON: epsilon})


def _takes_residual(match: Match) -> bool:
    made, other, total = (match.value(pattern) for pattern in (PRODUCT, OTHER, TOTAL))
    # One that has a residual already, as the second of a LoRA pair has its base's product, keeps it.
    free = other is not made and not _given(match.node(PRODUCT), RESIDUAL)
    return free and other.dtype == total.dtype is not None and other.shape == made.shape


def _with_residual(match: Match) -> Sequence[ir.Value]:
    return _changed(match, match.node(PRODUCT), {RESIDUAL: match.value(OTHER)}, {})


def _changed(
    match: Match, node: ir.Node, inputs: dict[int, ir.Value], attributes: dict[str, float]
) -> Sequence[ir.Value]:
    """`node` with other inputs, by place, and more attributes."""
    given: list[ir.Value | None] = [*node.inputs, *[None] * (max(inputs) + 1 - len(node.inputs))]
    for place, value in inputs.items():
        given[place] = value
    return match.add(DENSE_MATMUL.name, given, {**node.attributes, **attributes}, name=node.name or "", domain=DOMAIN)


def _layer(match: Match) -> Sequence[ir.Value]:
    inputs = [match.value(pattern) for pattern in (X, WEIGHT, DOWN, GATE_UP)]
    epsilon = {EPSILON: match.node(FIRST).attributes.get_float(EPSILON)}
    return match.add(GATED_MLP.name, inputs, epsilon, name=f"{match.node(LAYER).name}.layer", domain=DOMAIN)


FUSIONS = (
    Fusion((OF_NORM,), _with_norm, _takes_norm),
    Fusion((TOTAL,), _with_residual, _takes_residual),
    Fusion((LAYER,), _layer, lambda match: halved(match.node(SPLIT))),
)
fuse_linear_layers, linear_layers_fused = fusing("fuse_linear_layers", *FUSIONS)
