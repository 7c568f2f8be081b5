"""Fuse the ops between the product of a layer's queries, keys, values and gates and its attention: still::RotaryQkv.

TensorRT 8.6 runs the split, both rotations and the gate in 15 launches, four of which only move halves of heads. Launches dominate a decode
step of a small model. The fusion also saves compilation, which took seconds per layer.

requires: merged products, query and key first (merge_projections); known heads and sizes.
ensures: no split of float16 or bfloat16 numbers is left whose parts are only rotated by halves, passed on and gated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from still_graphs.edits import in_half, is_weight, known_sizes, on_last, rank, width
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.patterns import Either, Fusion, Match, Op, Result, Val, fusing
from still_graphs.pipelines import CUDA, PLUGINS
from still_kernels.rotary_qkv.fuse_embeddings import OF_EMBEDDINGS
from still_kernels.rotary_qkv.spec import ROTARY_QKV


class _Rotation(NamedTuple):
    """Rotation of `part` of a split: x * cos + concat(-second half, first half) * sin for heads `x`; the sum, and its flattened heads."""

    part: Result
    x: Op
    turned: Op
    halves: Op
    spread: tuple[Op, Op]
    total: Op
    flat: Op


def _rotation(part: Result) -> _Rotation:
    x = Op("Reshape", part, ...)
    halves = Op("Split", x, ..., outputs=2, check=on_last)
    turned = Op("Concat", Op("Neg", halves[1]), halves[0], check=on_last)
    cos, sin = (Op(("Reshape", "Unsqueeze"), angles, ..., shared=True) for angles in ANGLES)
    total = Op("Add", Op("Mul", x, cos), Op("Mul", turned, sin))
    return _Rotation(part, x, turned, halves, (cos, sin), total, Op("Reshape", total, ...))


WHOLE, ANGLES = Val(lambda value: rank(value) == 3), (Val(), Val())
BIAS = Val(lambda value: is_weight(value) and rank(value) == 1)


def _fusion(gated: bool, flat: tuple[bool, bool]) -> Fusion:
    """The fusion with or without a gate, and with or without flattened heads of queries and of keys."""
    split = Op("Split", WHOLE, ..., outputs=3 + gated, check=on_last)
    rotations = [_rotation(split[0]), _rotation(split[1])]
    turned = [rotation.flat if joined else rotation.total for rotation, joined in zip(rotations, flat, strict=True)]
    gate = [Op("Sigmoid", Either(split[3], Op("Add", split[3], BIAS)))] if gated else []

    def where(match: Match) -> bool:
        if not in_half(match.value(WHOLE)) or not all(map(width, match.node(split).outputs)):
            return False
        joined = [match.value(r.flat).shape == match.value(r.part).shape for r in rotations if r.flat in match]
        return all(joined) and all(_fits(match, rotation) for rotation in rotations)

    def replace(match: Match) -> Sequence[ir.Value]:
        node, biased = match.node(split), [match.value(BIAS)] if BIAS in match else []
        widths = [*map(width, node.outputs), *[0] * (not gated)]
        values = dict(zip((a.name for a in ROTARY_QKV.attributes), widths, strict=True))
        inputs = [match.value(WHOLE), *(match.value(angles) for angles in ANGLES), *biased]
        name = f"{node.name or match.results[0].name}.rotary"
        made = list(match.add(ROTARY_QKV.name, inputs, values, name=name, domain=DOMAIN, outputs=3 + gated))
        for place, rotation in enumerate(rotations):
            if not flat[place]:
                made[place] = _heads(match, rotation, made[place])
        return made

    return Fusion((*turned, split[2], *gate), replace, where, at=split)


def _fits(match: Match, rotation: _Rotation) -> bool:
    """Whether sizes are those of heads [B, T, H, D] rotated by angles [B, T, D]."""
    x = match.value(rotation.x)
    if x.shape is None or len(x.shape) != 4 or not all(isinstance(size, int) for size in x.shape[2:]):
        return False
    first, second = (width(half) for half in match.node(rotation.halves).outputs)
    batch, tokens, _, size = x.shape
    spread = [match.value(each).shape == ir.Shape([batch, tokens, 1, size]) for each in rotation.spread]
    whole = [
        match.value(a).shape == ir.Shape([batch, tokens, size]) and match.value(a).dtype == x.dtype for a in ANGLES
    ]
    return first == second and all(spread) and all(whole)


def _heads(match: Match, rotation: _Rotation, flat: ir.Value) -> ir.Value:
    """The node's output, split into heads."""
    part, result, x = (match.value(pattern) for pattern in (rotation.part, rotation.total, rotation.x))
    flat.name, flat.shape, flat.type = f"{result.name}.flat", part.shape, part.type
    name = f"{result.name}.heads"
    sizes = ir.tensor([0, 0, *known_sizes(x)[2:]], dtype=ir.DataType.INT64, name=name)
    (shape,) = match.add("Constant", [], {"value": sizes}, name=f"{name}/Constant")
    shape.name = name
    return match.add("Reshape", [flat, shape], name=f"{result.name}/Reshape")[0]


FUSIONS = [_fusion(gated, (query, key)) for gated, query, key in product((True, False), repeat=3)]
PASS = fusing("fuse_rotary", "the same between a product and its attention", *FUSIONS)
fuse_rotary = PASS.run

AFTER = ("low_rank_matmul", "swi_glu")
PASSES = {PLUGINS: (PASS,), CUDA: (OF_EMBEDDINGS,)}
