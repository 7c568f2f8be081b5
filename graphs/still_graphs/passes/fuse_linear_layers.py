"""Fuse products with what is around them: a norm before, a residual behind, and the products of a feed-forward layer with its gate.

TensorRT 8.6 compiles what lies between two plugins as a part of its own, a second each, and runs it in launches of its own; a decode step
of a small model is bound by launches. With these fused one part a layer is left.

requires: the products of sum_in_float32; RMSNormalization as ai.onnx has it since opset 23.
ensures: no norm of tokens [B, T, I] stands before one product alone; no sum of a product, used once, and activations is left.
"""

from __future__ import annotations

import onnx
from onnx import helper

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_graphs.ops.gated_mlp import GATED_MLP
from still_graphs.passes.gates import gated_halves
from still_graphs.passes.walk import (
    attribute,
    dimensions,
    drop_unused,
    element_types,
    initializers,
    only_reader,
    readers,
)

NAMES = DENSE_MATMUL.input_names()
EPSILON = DENSE_MATMUL.attributes[0].name
NORM, RESIDUAL = NAMES.index("norm_weight"), NAMES.index("residual")


@on_proto
def fuse_linear_layers(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place.

    Returns:
        Number of norms, residuals and feed-forward layers that were fused.
    """
    fuser = _Fuser(model.graph)
    changed = sum(fuser.norm(node) for node in fuser.products())
    changed += sum(fuser.residual(node) for node in fuser.products())
    changed += sum(fuser.layer(node) for node in fuser.products())
    if changed:
        drop_unused(model.graph)
    return changed


class _Fuser:
    """The graph and who makes and uses its values."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.weights, self.types, self.dims = initializers(graph), element_types(graph), dimensions(graph)
        self.order = {id(node): place for place, node in enumerate(graph.node)}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.users = readers(graph)

    def products(self) -> list[onnx.NodeProto]:
        return [n for n in self.graph.node if n.domain == DOMAIN and n.op_type == DENSE_MATMUL.name]

    def only_user(self, name: str, *kinds: str) -> onnx.NodeProto | None:
        """The node that alone uses `name`, where it is one of `kinds`."""
        return only_reader(self.users, name, *kinds)

    def norm(self, node: onnx.NodeProto) -> bool:
        """Take the norm that makes what a product reads."""
        norm = self.makers.get(node.input[0])
        if norm is None or norm.op_type != "RMSNormalization" or self.only_user(norm.output[0], node.op_type) is None:
            return False
        x, scale = norm.input
        types = {self.types.get(x), self.types.get(scale), self.types.get(node.output[0])}
        if scale not in self.weights or len(self.dims.get(x, ())) != 3 or attribute(norm, "axis", -1) not in (-1, 2):
            return False
        if len(types) != 1 or None in types:
            return False
        self._put(node, NORM, scale)
        node.input[0] = x
        node.attribute.append(helper.make_attribute(EPSILON, attribute(norm, "epsilon", 1e-5)))
        return True

    def residual(self, node: onnx.NodeProto) -> bool:
        """Take the sum of a product and activations; the node moves to where the sum was."""
        total = self.only_user(node.output[0], "Add")
        if total is None or len(set(total.input)) != 2:
            return False
        other = next(name for name in total.input if name != node.output[0])
        alike = self.types.get(other) == self.types.get(total.output[0]) is not None
        if not alike or self.dims.get(other) != self.dims.get(node.output[0]) or other in self.weights:
            return False
        self._put(node, RESIDUAL, other)
        self._replace(total, node)
        return True

    def layer(self, node: onnx.NodeProto) -> bool:
        """Make a feed-forward layer of its second product, `node`."""
        given = dict(zip(NAMES, node.input, strict=False))
        product = self.makers.get(node.input[0])
        if set(filter(given.get, given)) != {"input", "weight", "residual"} or product is None:
            return False
        found = self._gated(product, node)
        if found is None:
            return False
        first = dict(zip(NAMES, found.input, strict=False))
        if set(filter(first.get, first)) != {"input", "weight", "norm_weight"} or first["input"] != given["residual"]:
            return False
        epsilon = attribute(found, EPSILON)
        node.op_type, node.name = GATED_MLP.name, f"{node.name}.layer"
        node.input[:] = [first["input"], first["norm_weight"], given["weight"], first["weight"]]
        del node.attribute[:]
        node.attribute.append(helper.make_attribute(EPSILON, epsilon))
        return True

    def _gated(self, product: onnx.NodeProto, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The product whose halves make silu(gate) * up, which `product` is and `node` alone reads."""
        if self.only_user(product.output[0], node.op_type) is None:
            return None
        split = gated_halves(product, self.makers, self.users, self.dims)
        whole = None if split is None else self.makers.get(split.input[0])
        if split is None or whole not in self.products():
            return None
        return whole if self.only_user(split.input[0], "Split") is not None else None

    def _put(self, node: onnx.NodeProto, place: int, name: str) -> None:
        node.input.extend([""] * (place + 1 - len(node.input)))
        node.input[place] = name

    def _replace(self, old: onnx.NodeProto, new: onnx.NodeProto) -> None:
        """Let `new` stand in the place of `old` and make what it made."""
        copy = onnx.NodeProto()
        copy.CopyFrom(new)
        copy.output[:] = old.output
        gone = new.output[0]
        old.CopyFrom(copy)
        new.Clear()  # dropped: it makes nothing
        self.makers[old.output[0]] = old
        self.users.pop(gone)
        for name in old.input:
            if name:
                self.users[name] = [old if user is new else user for user in self.users.get(name, [])]
