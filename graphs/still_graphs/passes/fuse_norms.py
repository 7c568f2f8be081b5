"""Fuse the sum of a product and activations with the norm behind it, and take the first norm of a model: still::AddRmsNorm.

Low-bit products take neither, other than those of fuse_linear_layers. TensorRT 8.6 compiles each sum and norm as a part of its own: half of
the build of a small model (docs/notebook/quantization.md). The first norm, of embeddings, has no sum; TensorRT compiles it with their
table, of which it then keeps a copy for each profile.

requires: products of fuse_linear_layers; RMSNormalization as ai.onnx has it since opset 23.
ensures: no norm of the sum of a product and activations [B, T, I], both float16 or bfloat16, is left where something else reads the sum;
nor one of other activations that something else reads too, where a low-bit product reads the norm.
"""

from __future__ import annotations

from collections import Counter

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.add_rms_norm import ADD_RMS_NORM
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from still_graphs.passes.walk import (
    Rewriter,
    attribute,
    dimensions,
    element_types,
    initializers,
    readers,
    set_opset,
    value_names,
)

PRODUCTS = (MATMUL_NBITS.name, DENSE_MATMUL.name)
EPSILON = ADD_RMS_NORM.attributes[0].name


@on_proto
def fuse_norms(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place; results keep their names.

    Returns:
        Number of norms that were fused.
    """
    fuser = _Fuser(model)
    norms = [node for node in model.graph.node if node.op_type == "RMSNormalization" and fuser.fits(node)]
    sums = {norm.output[0]: total for norm in norms if (total := fuser.sum_of(norm)) is not None}
    firsts = [norm for norm in norms if norm.output[0] not in sums and fuser.is_first(norm)]
    for norm in norms:
        if norm.output[0] in sums:
            fuser.fuse(norm, sums[norm.output[0]])
    for norm in firsts:
        fuser.fuse_first(norm)
    if sums or firsts:
        set_opset(model, DOMAIN, ADD_RMS_NORM.version)
    return len(sums) + len(firsts)


class _Fuser:
    """The main graph, and who makes and reads its values."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = graph = model.graph
        self.weights, self.types, self.dims = initializers(graph), element_types(graph), dimensions(graph)
        self.makers = {name: node for node in graph.node for name in node.output}
        self.users, self.names = readers(graph), Rewriter(graph, value_names(graph))
        self.normed = Counter(node.input[0] for node in graph.node if node.op_type == "RMSNormalization")

    def fits(self, norm: onnx.NodeProto) -> bool:
        """Whether a kernel takes the norm: of tokens, in half precision, alone but not the only one to read them."""
        x, scale = norm.input
        types = {self.types.get(name) for name in (x, scale, norm.output[0])}
        if types not in ({TensorProto.FLOAT16}, {TensorProto.BFLOAT16}) or scale not in self.weights:
            return False
        if attribute(norm, "axis", -1) not in (-1, 2) or self.normed[x] != 1 or len(self.users[x]) < 2:
            return False
        return len(self.dims.get(x, [])) == 3 and self.dims[x] == self.dims.get(norm.output[0])

    def sum_of(self, norm: onnx.NodeProto) -> onnx.NodeProto | None:
        """The sum of a product and activations that a norm reads."""
        total = self.makers.get(norm.input[0])
        if total is None or total.op_type != "Add" or set(total.input) & set(self.weights):
            return None
        kind, shape = self.types[total.output[0]], self.dims[total.output[0]]
        if any(self.types.get(name) != kind or self.dims.get(name) != shape for name in total.input):
            return None
        made = [self.makers[name] for name in total.input if name in self.makers]
        return total if any(node.domain == DOMAIN and node.op_type in PRODUCTS for node in made) else None

    def is_first(self, norm: onnx.NodeProto) -> bool:
        """Whether a low-bit product reads the norm, and nodes of this graph alone, behind the norm, what it reads."""
        x, users = norm.input[0], self.users[norm.input[0]]
        if x not in self.makers or any(node is None or x not in node.input for node in users):
            return False
        if users[0] is None or list(users[0].output) != list(norm.output):
            return False
        reading = [node for node in self.users.get(norm.output[0], []) if node is not None]
        return any(node.domain == DOMAIN and node.op_type == MATMUL_NBITS.name for node in reading)

    def fuse(self, norm: onnx.NodeProto, total: onnx.NodeProto) -> None:
        """Let one node make what both did, in the place of the sum."""
        total.CopyFrom(self._node(norm, list(total.input), total.output[0]))
        self.graph.node.remove(norm)

    def fuse_first(self, norm: onnx.NodeProto) -> None:
        """Let what the norm reads go through its node, so that this node alone reads it."""
        x, through = norm.input[0], self.names.fresh(f"{norm.input[0]}.read")
        for node in self.graph.node:
            node.input[:] = [through if name == x else name for name in node.input]
        norm.CopyFrom(self._node(norm, [x, ""], through))
        info = next(info for info in self.graph.value_info if info.name == x)
        self.graph.value_info.add().CopyFrom(info)
        self.graph.value_info[-1].name = through

    def _node(self, norm: onnx.NodeProto, terms: list[str], total: str) -> onnx.NodeProto:
        values = {EPSILON: attribute(norm, "epsilon", 1e-5)}
        inputs, outputs = [*terms, norm.input[1]], [total, norm.output[0]]
        return helper.make_node(ADD_RMS_NORM.name, inputs, outputs, name=f"{norm.name}.fused", domain=DOMAIN, **values)
