"""Fuse both products with thin matrices, and the sum behind them: still::LowRankMatMul.

A LoRA pair that stays apart, or a gate of low rank, is two products whose matrices are read in no time: they cost two launches and two
waits for memory, and the sum a third.

requires: weights are initializers.
ensures: no product of float16 or bfloat16 tokens [B, T, I] with two matrices one behind the other is left of which the first has at most
    RANK columns, fewer than rows, and nothing else reads what lies between.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.low_rank_matmul import LOW_RANK_MATMUL
from still_graphs.passes.walk import (
    dimensions,
    element_types,
    exchange,
    initializers,
    only_reader,
    readers,
    set_opset,
)

RANK = 256
"""Most numbers between both products: of a few rows each program computes all of them."""


@on_proto
def fuse_low_rank(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place; results keep their names.

    Returns:
        Number of pairs that were fused.
    """
    graph = model.graph
    weights, types, dims, users = initializers(graph), element_types(graph), dimensions(graph), readers(graph)
    instead: dict[str, onnx.NodeProto | None] = {}
    for first in graph.node:
        if first.op_type != "MatMul" or first.output[0] in instead:
            continue
        second = only_reader(users, first.output[0], "MatMul")
        if second is None or second.input[0] != first.output[0]:
            continue
        inner, outer = (
            list(weights[node.input[1]].dims) if node.input[1] in weights else [] for node in (first, second)
        )
        if len(inner) != 2 or len(outer) != 2 or inner[1] > RANK or inner[1] >= inner[0]:
            continue
        kinds = {types.get(name) for name in (first.input[0], first.input[1], second.input[1])}
        if kinds not in ({TensorProto.FLOAT16}, {TensorProto.BFLOAT16}) or len(dims.get(first.input[0], [])) != 3:
            continue
        total, base = second, ""
        added = only_reader(users, second.output[0], "Add")
        if added is not None:
            other = next((name for name in added.input if name != second.output[0]), "")
            if other and other not in weights and dims.get(other) == dims.get(second.output[0], ""):
                total, base = added, other
        inputs = [first.input[0], first.input[1], second.input[1], *([base] if base else [])]
        instead |= {node.output[0]: None for node in (first, second)}
        instead[total.output[0]] = helper.make_node(
            LOW_RANK_MATMUL.name, inputs, total.output, name=f"{total.name or total.output[0]}.fused", domain=DOMAIN
        )
    if instead:
        exchange(graph, instead)
        set_opset(model, DOMAIN, LOW_RANK_MATMUL.version)
    return sum(node is not None for node in instead.values())
