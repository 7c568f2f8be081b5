"""Fuse what lies between both products of a feed-forward layer: still::SwiGlu.

TensorRT 8.6 splits the halves and gates in three launches a layer, and tries kernels for them over all rows and tokens; where products are
not of low bits fuse_linear_layers fuses them, too. ONNX Runtime's CUDA provider has three launches.

requires: merged products of gate and up (merge_projections); for fuse_gates those of fuse_linear_layers.
ensures: no silu(gate) * up of the halves of a product, of a low-bit one for fuse_gates, is left, float16 or bfloat16 [B, T, I].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from still_graphs.ops.swi_glu import SWI_GLU
from still_graphs.passes.gates import gated_halves
from still_graphs.passes.walk import attribute, dimensions, drop_unused, element_types, readers, set_opset

RESIDUAL = DENSE_MATMUL.input_names().index("residual")
WIDTH = SWI_GLU.attributes[0].name


@on_proto
def fuse_gates(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place; results keep their names.

    Returns:
        Number of gates that were fused.
    """
    return _fuse(model, is_low_bit)


@on_proto
def fuse_all_gates(model: onnx.ModelProto) -> int:
    """The same whatever the product is."""
    return _fuse(model, lambda name, makers: True)


def _fuse(model: onnx.ModelProto, wanted: Callable[[str, Mapping[str, onnx.NodeProto]], bool]) -> int:
    graph = model.graph
    types, dims, users = element_types(graph), dimensions(graph), readers(graph)
    makers = {name: node for node in graph.node for name in node.output}
    fused = 0
    for node in graph.node:
        split = gated_halves(node, makers, users, dims)
        if split is None or not wanted(split.input[0], makers):
            continue
        given, made = split.input[0], node.output[0]
        if {types.get(given), types.get(made)} not in ({TensorProto.FLOAT16}, {TensorProto.BFLOAT16}):
            continue
        if len(dims.get(given, [])) != 3 or attribute(split, "axis", 0) not in (-1, 2):
            continue
        width: dict[str, Any] = {WIDTH: dims[split.output[0]][-1]}
        node.CopyFrom(helper.make_node(SWI_GLU.name, [given], [made], name=f"{node.name}.gate", domain=DOMAIN, **width))
        fused += 1
    if fused:
        set_opset(model, DOMAIN, SWI_GLU.version)
        drop_unused(graph)
    return fused


def is_low_bit(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether a value is a low-bit product, to which others, an adapter's, may be added."""
    node = makers.get(name)
    while node is not None and node.domain == DOMAIN and node.op_type == DENSE_MATMUL.name:
        node = makers.get(node.input[RESIDUAL]) if len(node.input) > RESIDUAL else None
    return node is not None and node.domain == DOMAIN and node.op_type == MATMUL_NBITS.name
