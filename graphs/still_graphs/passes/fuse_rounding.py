"""Fuse what rounds keys and values to caches in 8 bits: still::RoundKeyValue.

TensorRT 8.6 runs it in 18 launches a layer, which cost a decode step more than small caches save.

requires: the rounding of still_kernels.codes.rounded, traced; types and shapes of keys and values declared.
ensures: no attention reads keys and values [B, T, HK, D], float16 or bfloat16, that are rounded so by other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from still_graphs.functions.codes import STEPS
from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN, OPS
from still_graphs.ops.round_key_value import ROUND_KEY_VALUE
from still_graphs.passes.walk import constant_value, dimensions, drop_unused, element_types, set_opset

NAMES = ROUND_KEY_VALUE.input_names()


@on_proto
def fuse_rounding(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place; results keep their names.

    Returns:
        Number of pairs of keys and values.
    """
    graph = model.graph
    types, dims = element_types(graph), dimensions(graph)
    makers = {name: node for node in graph.node for name in node.output}
    order = {name: place for place, node in enumerate(graph.node) for name in node.output}
    fused = 0
    for node in graph.node:
        if node.domain != DOMAIN or not set(NAMES) <= set(OPS[node.op_type].input_names()):
            continue
        given = dict(zip(OPS[node.op_type].input_names(), node.input, strict=False))
        made = [given[name] for name in NAMES]
        rows = [rounded_rows(graph, makers, name) for name in made]
        if None in rows or len(set(made)) != 2:
            continue
        both = [*made, *(x for x in rows if x is not None)]
        if {types.get(name) for name in both} not in ({TensorProto.FLOAT16}, {TensorProto.BFLOAT16}):
            continue
        shape = dims.get(both[0], [])
        if len(shape) != 4 or not isinstance(shape[3], int) or any(dims.get(name) != shape for name in both):
            continue
        last = makers[max(made, key=order.__getitem__)]
        for name in made:
            makers[name].output[:] = [f"{name}.unused"]  # dropped: nothing reads it
        last.CopyFrom(
            helper.make_node(ROUND_KEY_VALUE.name, both[2:], made, name=f"{node.name}.rounding", domain=DOMAIN)
        )
        fused += 1
    if fused:
        set_opset(model, DOMAIN, ROUND_KEY_VALUE.version)
        drop_unused(graph)
    return fused


def rounded_rows(graph: onnx.GraphProto, makers: Mapping[str, onnx.NodeProto], name: str) -> str | None:
    """What a value is the rounding of, if it is one."""

    def inputs(name: str, kind: str, count: int) -> list[str]:
        node = makers.get(name)
        return (
            list(node.input)[:count] if node is not None and node.op_type == kind and not node.domain else [""] * count
        )

    (product,) = inputs(name, "Cast", 1)
    codes, scale = inputs(product, "Mul", 2)
    (shares,) = inputs(codes, "Round", 1)
    wide, divisor = inputs(shares, "Div", 2)
    most, steps = inputs(scale, "Div", 2)
    (largest,) = inputs(most, "Clip", 1)
    (magnitudes,) = inputs(largest, "ReduceMax", 1)
    if inputs(magnitudes, "Abs", 1) != [wide] or divisor != scale or not wide:
        return None
    value = constant_value(graph, inputs(steps, "Expand", 1)[0] or steps)
    if value is None or value.size != 1 or float(value.item()) != STEPS:
        return None
    return inputs(wide, "Cast", 1)[0] or None
