"""Fuse what lies between the product of a layer's queries, keys, values and gates, and its attention: still::RotaryQkv.

TensorRT 8.6 runs the split, both rotations and the gate in 15 launches, four of which only move halves of heads; a decode step of a small
model is bound by launches. Nothing is left there for it to compile either, which took seconds a layer.

requires: merged products, query and key first (merge_projections); heads and their sizes known; angles made ahead of the split.
ensures: no split of float16 or bfloat16 numbers is left whose parts are rotated by halves, passed on and gated, and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.rotary_qkv import ROTARY_QKV
from still_graphs.passes.walk import (
    Rewriter,
    attribute,
    dimensions,
    drop_unused,
    element_types,
    initializers,
    only_reader,
    readers,
    set_opset,
    value_names,
)


class _Rotation(NamedTuple):
    """Heads [B, T, H, D], `result`, by angles [B, T, D]."""

    result: str
    cos: str
    sin: str


class _Found(NamedTuple):
    """A split and what is made of its parts; `bias` and `gate` are "" where there is none."""

    split: onnx.NodeProto
    query: _Rotation
    key: _Rotation
    bias: str
    gate: str


@on_proto
def fuse_rotary(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place; results keep their names.

    Returns:
        Number of splits that were fused with what follows.
    """
    fuser = _Fuser(model.graph)
    found = {id(node): fuser.match(node) for node in model.graph.node if node.op_type == "Split"}
    for node in model.graph.node:
        match = found.get(id(node))
        if match is not None:
            fuser.fuse(match)
        elif not fuser.replaced.intersection(node.output):
            fuser.rewriter.nodes.append(node)
    fuser.rewriter.finish()
    if any(found.values()):
        set_opset(model, DOMAIN, ROTARY_QKV.version)
        drop_unused(model.graph)
    return sum(match is not None for match in found.values())


class _Fuser:
    """The graph, who makes and uses its values, and the nodes that it will have."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.weights, self.types, self.dims = initializers(graph), element_types(graph), dimensions(graph)
        self.graph, self.rewriter = graph, Rewriter(graph, value_names(graph))
        self.makers = {name: node for node in graph.node for name in node.output}
        self.order = {name: place for place, node in enumerate(graph.node) for name in node.output}
        self.users = readers(graph)
        self.replaced: set[str] = set()

    def match(self, split: onnx.NodeProto) -> _Found | None:
        """What is made of the parts of a split, where all of it can be fused."""
        given = self.dims.get(split.input[0], [])
        kind = self.types.get(split.input[0])
        if len(given) != 3 or attribute(split, "axis", 0) not in (-1, 2) or len(split.output) not in (3, 4):
            return None
        if kind not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            return None
        if not all(isinstance(self.dims.get(name, [None])[-1], int) for name in split.output):
            return None
        query, key = (self.rotation(name) for name in split.output[:2])
        if query is None or key is None or query[1:] != key[1:]:
            return None
        place = self.order[split.output[0]]
        if any(self.order.get(name, -1) > place for name in (query.cos, query.sin)):
            return None
        if len(split.output) == 3:
            return _Found(split, query, key, "", "")
        gate = self.gate(split.output[3])
        return None if gate is None else _Found(split, query, key, *gate)

    def rotation(self, part: str) -> _Rotation | None:
        """The rotation of a part, alone: x * cos + concat(-second half, first half) * sin."""
        view = self.only_user(part, "Reshape")
        x = view.output[0] if view is not None else ""
        dims, users = self.dims.get(x, []), self.users.get(x, [])
        if len(dims) != 4 or not all(isinstance(size, int) for size in dims[2:]) or len(users) != 2:
            return None
        near, halves = sorted((node for node in users if node is not None), key=lambda node: node.op_type)
        if (near.op_type, halves.op_type, len(halves.output)) != ("Mul", "Split", 2):
            return None
        first, second = halves.output
        back = self.only_user(second, "Neg")
        turned = self.only_user(first, "Concat")
        if back is None or turned is None or list(turned.input) != [back.output[0], first]:
            return None
        sizes = [self.dims.get(name, [None])[-1] for name in halves.output]
        if {attribute(node, "axis", 0) % 4 for node in (halves, turned)} != {3} or len(set(sizes)) != 1:
            return None
        far = self.only_user(turned.output[0], "Mul")
        if self.only_user(back.output[0], "Concat") is None or far is None:
            return None
        total, other = self.only_user(far.output[0], "Add"), self.only_user(near.output[0], "Add")
        if total is None or total is not other or len(set(total.input)) != 2:
            return None
        cos, sin = self.angles(near, x, dims), self.angles(far, turned.output[0], dims)
        return _Rotation(total.output[0], cos, sin) if cos and sin else None

    def angles(self, product: onnx.NodeProto, x: str, dims: list[int | str | None]) -> str:
        """The angles [B, T, D] that a product has beside x [B, T, H, D], spread over heads there; "" where it has none."""
        beside = [name for name in product.input if name != x]
        spread = self.makers.get(beside[0]) if len(beside) == 1 else None
        if spread is None or spread.op_type not in ("Reshape", "Unsqueeze"):
            return ""
        whole = self.dims.get(spread.output[0]) == [*dims[:2], 1, dims[3]]
        same = self.dims.get(spread.input[0]) == [*dims[:2], dims[3]]
        return spread.input[0] if whole and same and self.types.get(spread.input[0]) == self.types.get(x) else ""

    def gate(self, part: str) -> tuple[str, str] | None:
        """Bias and result of the sigmoid of a part, alone."""
        added = self.only_user(part, "Add")
        bias = "" if added is None else next((name for name in added.input if name != part), "")
        if added is not None and (bias not in self.weights or len(self.weights[bias].dims) != 1):
            return None
        bent = self.only_user(part if added is None else added.output[0], "Sigmoid")
        return None if bent is None else (bias, bent.output[0])

    def only_user(self, name: str, kind: str) -> onnx.NodeProto | None:
        """The node that alone uses `name`, where it is a `kind`."""
        return only_reader(self.users, name, kind)

    def fuse(self, found: _Found) -> None:
        """Append the node in the place of the split, and what tells heads apart for those that want them so."""
        split, widths = found.split, [int(self.dims[name][-1] or 0) for name in found.split.output]
        views, names = [], []
        for part, rotation in zip(split.output, (found.query, found.key), strict=False):
            fused = self.only_user(rotation.result, "Reshape")
            if fused is not None and self.dims.get(fused.output[0]) == self.dims[part]:
                names.append(fused.output[0])  # heads side by side again
                self.replaced.add(fused.output[0])
            else:
                names.append(self.rewriter.fresh(f"{rotation.result}.flat"))
                views.append((names[-1], rotation.result))
                shape = self.dims[part]
                self.graph.value_info.append(
                    helper.make_tensor_value_info(names[-1], self.types[split.input[0]], shape)
                )
        names += [split.output[2], *([found.gate] if found.gate else [])]
        inputs = [split.input[0], found.query.cos, found.query.sin, *([found.bias] if found.bias else [])]
        values: dict[str, Any] = dict(zip((a.name for a in ROTARY_QKV.attributes), [*widths, 0], strict=False))
        self.rewriter.nodes.append(
            helper.make_node(
                ROTARY_QKV.name, inputs, names, name=f"{split.name or names[0]}.rotary", domain=DOMAIN, **values
            )
        )
        self.replaced |= {found.query.result, found.key.result, *([found.gate] if found.gate else [])}
        for flat, result in views:
            heads = self.rewriter.constant([0, 0, *self.dims[result][2:]], "int64", f"{result}.heads")
            self.rewriter.node("Reshape", [flat, heads], result)
