"""Fuse the sum of a product and activations with the following norm, and replace a model's first norm: still::AddRmsNorm.

Low-bit products have neither, except those of fuse_linear_layers. TensorRT 8.6 compiles each sum and norm separately: half of the build
time of a small model (docs/notebook/quantization.md). The first norm, of embeddings, has no sum. TensorRT compiles it with their table and
then keeps a copy of the table for each profile.

requires: products of fuse_linear_layers; RMSNormalization as in ai.onnx since opset 23.
ensures: no norm is left of a sum of a product and activations [B, T, I], both float16 or bfloat16, if something else reads the sum; and no
norm of other activations that something else reads, if a low-bit product reads the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.edits import in_half, is_weight, on_last, rank
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.patterns import Fusion, Match, Op, Val, fusing
from still_graphs.pipelines import PLUGINS
from still_kernels.add_rms_norm.spec import ADD_RMS_NORM
from still_kernels.dense_matmul.spec import DENSE_MATMUL
from still_kernels.matmul_nbits.spec import MATMUL_NBITS
from still_kernels.swi_glu.fuse import has_codes

EPSILON = ADD_RMS_NORM.attributes[0].name


X = Val()
TERMS = Val(lambda value: not is_weight(value)), Val(lambda value: not is_weight(value))
SCALE = Val(is_weight)
TOTAL = Op("Add", *TERMS)
NORM, FIRST = Op("RMSNormalization", TOTAL, SCALE), Op("RMSNormalization", X, SCALE)


def _fits(x: ir.Value, norm: ir.Node) -> bool:
    """Whether the kernel covers the norm of `x`: activations of tokens in half precision, with other readers."""
    norms = [node for node, place in x.uses() if node.op_type == norm.op_type and place == 0]
    readers = len(x.uses()) + x.is_graph_output()
    made, scale = norm.outputs[0], norm.inputs[1]
    if scale is None or not in_half(x, scale, made) or not on_last(norm, -1) or len(norms) != 1 or readers < 2:
        return False
    return rank(x) == 3 and x.shape == made.shape


def _is_sum(match: Match) -> bool:
    """Whether the norm's input is a product plus activations."""
    total, terms = match.value(TOTAL), [match.value(term) for term in TERMS]
    if not _fits(total, match.node(NORM)) or any(x.dtype != total.dtype or x.shape != total.shape for x in terms):
        return False
    return any(_of(x, MATMUL_NBITS.name, DENSE_MATMUL.name) for x in terms)


def _of(value: ir.Value, *ops: str) -> bool:
    node = value.producer()
    return node is not None and node.domain == DOMAIN and node.op_type in ops


def _is_first(match: Match) -> bool:
    """Whether a low-bit product reads the norm, and its input has readers only in this graph and after the norm."""
    x, norm = match.value(X), match.node(FIRST)
    if not _fits(x, norm) or x.producer() is None or x.is_graph_output() or norm.graph is None:
        return False
    users = {node for node, _ in x.uses()}
    if any(node.graph is not norm.graph for node in users) or next(n for n in norm.graph if n in users) is not norm:
        return False
    readers = {node for node, _ in norm.outputs[0].uses()}
    return any(map(has_codes, readers))


def _fuse_sum(match: Match) -> Sequence[ir.Value]:
    """Replace sum and norm by one node."""
    total, normed = _add(match, match.node(NORM), [match.value(term) for term in TERMS])
    return normed, total


def _fuse_first(match: Match) -> Sequence[ir.Value]:
    """Pass the norm's input through the new node, its only reader."""
    x, norm = match.value(X), match.node(FIRST)
    uses = [use for use in x.uses() if use.node is not norm]
    through, normed = _add(match, norm, [x, None])
    through.name, through.shape, through.type = f"{x.name}.read", x.shape, x.type
    for node, place in uses:
        node.replace_input_with(place, through)
    return (normed,)


def _add(match: Match, norm: ir.Node, terms: list[ir.Value | None]) -> Sequence[ir.Value]:
    values = {EPSILON: norm.attributes.get_float("epsilon", 1e-5)}
    inputs = [*terms, match.value(SCALE)]
    return match.add(ADD_RMS_NORM.name, inputs, values, name=f"{norm.name}.fused", domain=DOMAIN, outputs=2)


FUSIONS = Fusion((NORM, TOTAL), _fuse_sum, _is_sum, at=TOTAL), Fusion((FIRST,), _fuse_first, _is_first)
PASS = fusing("fuse_norms", "the same between products that do not take norms", *FUSIONS)
fuse_norms = PASS.run

AFTER = ("gated_mlp",)
PASSES = {PLUGINS: (PASS,)}
