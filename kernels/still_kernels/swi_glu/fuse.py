"""Fuse the ops between both products of a feed-forward layer: still::SwiGlu.

TensorRT 8.6 splits the halves and gates in three launches per layer, and tries kernels for them over all rows and tokens.
fuse_linear_layers fuses them with products that are not low-bit. ONNX Runtime's CUDA provider also has three launches.

requires: merged products of gate and up (merge_projections); for fuse_gates those of fuse_linear_layers.
ensures: no silu(gate) * up of the halves of a product (low-bit for fuse_gates) is left, float16 or bfloat16 [B, T, I].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from still_graphs.edits import in_half, on_last, rank, width
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.patterns import Fusion, Match, Op, Pattern, Val, fusing
from still_graphs.pipelines import CUDA, PLUGINS
from still_kernels.dense_matmul.spec import DENSE_MATMUL
from still_kernels.matmul_nbits.spec import MATMUL_NBITS
from still_kernels.swi_glu.spec import SWI_GLU

RESIDUAL, CODES = map(DENSE_MATMUL.input_names().index, ("residual", "codes"))
WIDTH = SWI_GLU.attributes[0].name


def gated(whole: Pattern) -> tuple[Op, Op]:
    """silu(gate) * up of the halves of one value, and the Split."""
    split = Op("Split", whole, ..., outputs=2)
    return Op("Mul", Op("Mul", split[0], Op("Sigmoid", split[0])), split[1]), split


def halved(split: ir.Node) -> bool:
    """Whether a Split makes halves of a known size."""
    first, second = map(width, split.outputs)
    return first == second > 0


def has_codes(node: ir.Node) -> bool:
    """Whether a node is a still product with a low-bit weight."""
    codes = node.inputs[CODES] if node.op_type == DENSE_MATMUL.name and len(node.inputs) > CODES else None
    return node.domain == DOMAIN and (node.op_type == MATMUL_NBITS.name or codes is not None)


def is_low_bit(value: ir.Value | None) -> bool:
    """Whether a value is a low-bit product, possibly plus others, such as an adapter's."""
    node = value.producer() if value is not None else None
    while node is not None and node.domain == DOMAIN and node.op_type == DENSE_MATMUL.name and not has_codes(node):
        residual = node.inputs[RESIDUAL] if len(node.inputs) > RESIDUAL else None
        node = residual.producer() if residual is not None else None
    return node is not None and has_codes(node)


WHOLE = Val(lambda value: rank(value) == 3)
GATED, SPLIT = gated(WHOLE)


def _fits(match: Match) -> bool:
    split = match.node(SPLIT)
    return halved(split) and on_last(split) and in_half(match.value(WHOLE), match.value(GATED))


def _replace(match: Match) -> Sequence[ir.Value]:
    values = {WIDTH: width(match.value(SPLIT))}
    name = f"{match.node(GATED).name}.gate"
    return match.add(SWI_GLU.name, [match.value(WHOLE)], values, name=name, domain=DOMAIN)


GATES = Fusion((GATED,), _replace, _fits)
OF_LOW_BITS = fusing(
    "fuse_gates",
    "the same between the products of a low-bit feed-forward layer",
    replace(GATES, where=lambda match: _fits(match) and is_low_bit(match.value(WHOLE))),
)
OF_ALL = fusing("fuse_all_gates", "its CUDA provider launches a feed-forward layer's gate node by node", GATES)
fuse_gates, fuse_all_gates = OF_LOW_BITS.run, OF_ALL.run

AFTER = ("add_rms_norm",)
PASSES = {PLUGINS: (OF_LOW_BITS,), CUDA: (OF_ALL,)}
