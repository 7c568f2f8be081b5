"""Fuse what lies between a small layer's attention and the next one's: still::BetweenAttention.

A step of a small model is bound by launches, of which ONNX Runtime's CUDA provider has eight there; a token takes one. For several tokens
there is no such kernel, so a graph of steps alone takes it.

requires: merged products, gates and rotations of ours, sums and norms of ONNX Runtime's.
ensures: between two attentions of layers so small that a GPU holds all of their weights at a time no such product is left, in float16 or
    bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.edits import in_half, is_weight, width
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.ops.between_attention import BETWEEN_ATTENTION, in_one_launch
from still_graphs.ops.swi_glu import SWI_GLU
from still_graphs.patterns import Fusion, Match, Op, Pattern, Val, fusing

EPSILON, GATE_WIDTH = (a.name for a in BETWEEN_ATTENTION.attributes)


def _norm(x: Pattern, y: Pattern, weight: Val) -> Op:
    """The norm of a sum, and in the fourth place the sum."""
    return Op("SkipSimplifiedLayerNormalization", x, y, weight, domain="com.microsoft", outputs=4)


ATTENTION, RESIDUAL = Val(), Val()
WEIGHTS = OUTPUT, NORM, DOWN, GATE_UP, NEXT_NORM, NEXT = [Val(is_weight) for _ in range(6)]
GATE = Val(is_weight)
FIRST = _norm(RESIDUAL, Op("MatMul", ATTENTION, OUTPUT), NORM)
GATED = Op(SWI_GLU.name, Op("MatMul", FIRST, GATE_UP), domain=DOMAIN)
SECOND = _norm(FIRST[3], Op("MatMul", GATED, DOWN), NEXT_NORM)
PRODUCT, BESIDE = Op("MatMul", SECOND, NEXT), Op("MatMul", SECOND, GATE)


def _fits(match: Match) -> bool:
    """Whether a token takes one launch."""
    epsilons = {match.node(norm).attributes.get_float("epsilon", 0.0) for norm in (FIRST, SECOND)}
    gate = [match.value(GATE)] if GATE in match else []
    if len(epsilons) != 1 or not in_half(*(match.value(pattern) for pattern in (ATTENTION, RESIDUAL, *WEIGHTS)), *gate):
        return False
    sizes = [width(match.value(pattern)) for pattern in (ATTENTION, RESIDUAL, GATED, NEXT)] + [width(x) for x in gate]
    return min(sizes) > 0 and in_one_launch(*sizes)


def _replace(match: Match) -> Sequence[ir.Value]:
    gate = [match.value(GATE)] if GATE in match else []
    inputs = [*(match.value(pattern) for pattern in (ATTENTION, RESIDUAL, *WEIGHTS)), *gate]
    values = {
        EPSILON: match.node(FIRST).attributes.get_float("epsilon", 0.0),
        GATE_WIDTH: sum(width(x) for x in gate),
    }
    name = f"{match.node(SECOND).name}.between"
    made = match.add(BETWEEN_ATTENTION.name, inputs, values, name=name, domain=DOMAIN, outputs=2 + len(gate))
    return *made[1:], made[0]


FUSIONS = Fusion((PRODUCT, BESIDE, SECOND[3]), _replace, _fits), Fusion((PRODUCT, SECOND[3]), _replace, _fits)
fuse_between_attention, between_attention_fused = fusing("fuse_between_attention", *FUSIONS)
