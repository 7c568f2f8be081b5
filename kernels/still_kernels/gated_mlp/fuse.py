"""Fuse the products of a feed-forward layer with its norm, gate and residual: still::GatedMlp.

requires: the products of still::DenseMatMul with their norms and residuals.
ensures: no such layer is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.patterns import Fusion, Match, Op, Val, fusing
from still_graphs.pipelines import PLUGINS
from still_kernels.dense_matmul.fuse import EPSILON, NORM, RESIDUAL
from still_kernels.dense_matmul.spec import DENSE_MATMUL
from still_kernels.gated_mlp.spec import GATED_MLP
from still_kernels.swi_glu.fuse import gated, halved

X, GATE_UP, DOWN, WEIGHT = Val(), Val(), Val(), Val()
FIRST = Op(DENSE_MATMUL.name, X, GATE_UP, *[None] * (NORM - 2), WEIGHT, domain=DOMAIN)
GATED, SPLIT = gated(FIRST)
LAYER = Op(DENSE_MATMUL.name, GATED, DOWN, *[None] * (RESIDUAL - 2), X, domain=DOMAIN)


def _layer(match: Match) -> Sequence[ir.Value]:
    inputs = [match.value(pattern) for pattern in (X, WEIGHT, DOWN, GATE_UP)]
    epsilon = {EPSILON: match.node(FIRST).attributes.get_float(EPSILON)}
    return match.add(GATED_MLP.name, inputs, epsilon, name=f"{match.node(LAYER).name}.layer", domain=DOMAIN)


FUSION = Fusion((LAYER,), _layer, lambda match: halved(match.node(SPLIT)))
PASS = fusing("fuse_feed_forward", "the same between the products of a feed-forward layer", FUSION)
fuse_feed_forward = PASS.run

AFTER = ("dense_matmul",)
PASSES = {PLUGINS: (PASS,)}
