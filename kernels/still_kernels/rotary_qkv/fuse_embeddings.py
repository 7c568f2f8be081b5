"""Fuse the ops between the products of a layer and its attention, in graphs with RotaryEmbedding: still::RotaryQkv.

ONNX Runtime's CUDA provider runs the split, both rotations, the bias of the gate and its sigmoid in five launches.

requires: query, key and value of one product, which is split; RotaryEmbedding of flattened heads, by the first halves of angles [B, T, D]
with equal halves (export/fuse.py).
ensures: no such split in float16 or bfloat16 is left; a gate, the sigmoid of another product of the same tokens, is fused too.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.edits import in_half, is_weight, on_last, rank, width
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.patterns import Either, Fusion, Match, Op, Val, fusing
from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL
from still_kernels.matmul_nbits.spec import MATMUL_NBITS
from still_kernels.rotary_qkv.spec import ROTARY_QKV

PRODUCTS = ("MatMul", MATMUL_NBITS.name, LOW_RANK_MATMUL.name)


WHOLE, COS, SIN = (Val(lambda value: rank(value) == 3) for _ in range(3))
SPLIT = Op("Split", WHOLE, ..., outputs=3, check=on_last)
HALVES = [Op("Split", angles, ..., outputs=2, shared=True, check=on_last)[0] for angles in (COS, SIN)]
QUERY, KEY = (Op("RotaryEmbedding", SPLIT[part], *HALVES) for part in range(2))
PARTS = QUERY, KEY, SPLIT[2]
SOURCE, BIAS = Val(), Val(lambda value: is_weight(value) and rank(value) == 1)
BIASED = Op("Add", SOURCE, BIAS)
GATE = Op("Sigmoid", Either(BIASED, SOURCE))


def _fits(match: Match) -> bool:
    """Whether whole heads of query and key are rotated."""
    rotations = match.node(QUERY), match.node(KEY)
    size, widths = width(match.value(COS)), [width(part) for part in match.node(SPLIT).outputs]
    if any(n.attributes.get_int(name, 0) for n in rotations for name in ("interleaved", "rotary_embedding_dim")):
        return False
    turned = [node.attributes.get_int("num_heads", 0) * size for node in rotations]
    return in_half(match.value(WHOLE)) and turned == widths[:2] and all(widths)


def _gated(match: Match) -> bool:
    """Whether the layer has a gate: another product of the same tokens, without other readers."""
    whole, source = match.value(WHOLE), match.value(SOURCE)
    product, other = whole.producer(), source.producer()
    if product is None or other is None or other is product or other.op_type not in PRODUCTS:
        return False
    alone = len(source.uses()) == 1 and not source.is_graph_output() and other.inputs[0] is product.inputs[0]
    bias = [match.value(BIAS)] if BIAS in match else []
    return alone and in_half(whole, source, *bias) and width(match.value(GATE)) == width(source) > 0 and _fits(match)


def _replace(match: Match) -> Sequence[ir.Value]:
    split = match.node(SPLIT)
    inputs: list[ir.Value | None] = [match.value(pattern) for pattern in (WHOLE, COS, SIN)]
    widths = [*(width(part) for part in split.outputs), 0]
    if GATE in match:
        inputs += [match.value(BIAS) if BIAS in match else None, match.value(SOURCE)]
        widths[3] = width(match.value(GATE))
    values = dict(zip((a.name for a in ROTARY_QKV.attributes), widths, strict=True))
    name = f"{split.name or match.results[0].name}.fused"
    return match.add(ROTARY_QKV.name, inputs, values, name=name, domain=DOMAIN, outputs=3 + (GATE in match))


FUSIONS = Fusion((*PARTS, GATE), _replace, _gated), Fusion(PARTS, _replace, _fits)
OF_EMBEDDINGS = fusing("fuse_rotary_embeddings", "the same between a product and its attention", *FUSIONS)
fuse_rotary_embeddings = OF_EMBEDDINGS.run
