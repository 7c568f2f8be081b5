"""Fuse what lies between the products of a layer and its attention where ONNX Runtime's rotations are in the graph: still::RotaryQkv.

Its CUDA provider runs the split, both rotations, the bias of the gate and its sigmoid in five launches.

requires: query, key and value of one product, which is split; RotaryEmbedding of heads side by side, by the first halves of angles
    [B, T, D] whose halves are alike (export/fuse.py).
ensures: no such split in float16 or bfloat16 is left; a gate beside it, the sigmoid of another product of the same tokens, is fused too.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.low_rank_matmul import LOW_RANK_MATMUL
from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from still_graphs.ops.rotary_qkv import ROTARY_QKV
from still_graphs.passes.walk import (
    attribute,
    dimensions,
    element_types,
    exchange,
    initializers,
    only_reader,
    readers,
    set_opset,
)

PRODUCTS = ("MatMul", MATMUL_NBITS.name, LOW_RANK_MATMUL.name)


@on_proto
def fuse_rotary_embeddings(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place; results keep their names.

    Returns:
        Number of splits that were fused with what follows.
    """
    fuser = _Fuser(model.graph)
    for split in model.graph.node:
        if split.op_type == "Split" and len(split.output) == 3:
            fuser.fuse(split)
    if fuser.instead:
        exchange(model.graph, fuser.instead)
        set_opset(model, DOMAIN, ROTARY_QKV.version)
    return fuser.fused


class _Fuser:
    """The graph, who makes and uses its values, and the nodes that it will have."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.weights, self.types, self.dims = initializers(graph), element_types(graph), dimensions(graph)
        self.makers = {name: node for node in graph.node for name in node.output}
        self.users = readers(graph)
        self.instead: dict[str, onnx.NodeProto | None] = {}
        self.fused = 0

    def fuse(self, split: onnx.NodeProto) -> None:
        """Fuse one split, where its first two parts are rotated alike."""
        if self.types.get(split.input[0]) not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            return
        if len(self.dims.get(split.input[0], [])) != 3 or attribute(split, "axis", 0) not in (-1, 2):
            return
        widths = [self.width(name) for name in split.output]
        query, key = (only_reader(self.users, name, "RotaryEmbedding") for name in split.output[:2])
        if query is None or key is None or not all(widths) or list(query.input[1:]) != list(key.input[1:]):
            return
        angles = [self.whole(name) for name in query.input[1:]]
        if len(angles) != 2 or not all(angles):
            return
        size = self.width(angles[0])
        heads = [attribute(node, "num_heads", 0) for node in (query, key)]
        other = [attribute(node, name, 0) for node in (query, key) for name in ("interleaved", "rotary_embedding_dim")]
        if any(other) or not size or [count * size for count in heads] != widths[:2]:
            return
        outputs, inputs, gates = [query.output[0], key.output[0], split.output[2]], [split.input[0], *angles], 0
        if (gate := self.gate(split)) is not None:
            source, bias, result = gate
            gates = self.width(result)
            inputs += [bias, source]
            outputs.append(result)
            self.instead |= {name: None for name in (self.makers[result].input[0], result) if name != source}
        self.instead |= {split.output[0]: None, query.output[0]: None, key.output[0]: None}
        values: dict[str, Any] = dict(zip((a.name for a in ROTARY_QKV.attributes), (*widths, gates), strict=True))
        self.instead[outputs[0]] = helper.make_node(
            ROTARY_QKV.name, inputs, outputs, name=f"{split.name or outputs[0]}.fused", domain=DOMAIN, **values
        )
        self.fused += 1

    def width(self, name: str) -> int:
        """Numbers of a token, 0 where they are not known."""
        last = self.dims.get(name, [None])[-1]
        return last if isinstance(last, int) else 0

    def whole(self, half: str) -> str:
        """The angles [B, T, D] of which a value is the first half; "" where it is something else."""
        split = self.makers.get(half)
        if split is None or split.op_type != "Split" or len(split.output) != 2 or split.output[0] != half:
            return ""
        return (
            split.input[0]
            if attribute(split, "axis", 0) in (-1, 2) and len(self.dims.get(split.input[0], [])) == 3
            else ""
        )

    def gate(self, split: onnx.NodeProto) -> tuple[str, str, str] | None:
        """A gate beside a split: what its numbers are, its bias ("": none), and its result."""
        product = self.makers.get(split.input[0])
        for beside in self.users.get(product.input[0], []) if product is not None else []:
            if beside is None or product is None or beside is product or beside.op_type not in PRODUCTS:
                continue
            if beside.input[0] != product.input[0]:
                continue
            source, bias = beside.output[0], ""
            added = only_reader(self.users, source, "Add")
            if added is not None:
                bias = next((name for name in added.input if name != source), "")
                if bias not in self.weights or len(self.weights[bias].dims) != 1:
                    continue
            bent = only_reader(self.users, source if added is None else added.output[0], "Sigmoid")
            kinds = {self.types.get(name) for name in (split.input[0], source, *([bias] if bias else []))}
            if bent is not None and len(kinds) == 1 and self.width(bent.output[0]) == self.width(source) > 0:
                return source, bias, bent.output[0]
        return None
