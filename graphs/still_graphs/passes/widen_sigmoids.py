"""Compute every Sigmoid and Softplus in float32 where one of them is.

TensorRT 8.6 compiles a sigmoid as 1 / (1 + e^-x) and keeps one number 1 for all sigmoids of a part of the model. Where one of them is
float32 and another float16, as gates and feed-forward layers are, it "could not infer output types" and finds no kernels for the part.

requires: the types of their inputs known.
ensures: nodes of these operators in the main graph are all float32, or none is.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import Rewriter, element_types, value_names

BENT = ("Sigmoid", "Softplus")
"""Operators made of e^x and 1."""


@on_proto
def widen_sigmoids(model: onnx.ModelProto) -> int:
    """Put casts around them, in place.

    Returns:
        Number of nodes that compute in float32 now.
    """
    graph = model.graph
    types, rewriter, changed = element_types(graph), Rewriter(graph, value_names(graph)), 0
    bent = [types.get(n.input[0]) if n.domain == "" and n.op_type in BENT else None for n in graph.node]
    if TensorProto.FLOAT not in bent:
        return 0
    for node, narrow in zip(graph.node, bent, strict=True):
        if narrow in (None, TensorProto.FLOAT):
            rewriter.nodes.append(node)
            continue
        output = node.output[0]
        wide = rewriter.node("Cast", [node.input[0]], hint=f"{output}.wide", to=TensorProto.FLOAT)
        rewriter.node("Cast", [rewriter.node(node.op_type, [wide], hint=f"{output}.bent")], output, to=narrow)
        changed += 1
    rewriter.finish()
    return changed
