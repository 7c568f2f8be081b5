"""Give the graph int32 inputs and outputs in the place of int64 ones.

TensorRT 8.6 has no int64 and plugins take their counts as int32; token ids and lengths fit. Inside, int64 stays where it was,
which every parser reads (8.6 takes it for int32), but for an output that is the sum of inputs: lengths, which need no casts then.

requires: inputs and outputs declare their types.
ensures: no int64 input or output; the names are unchanged.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import Rewriter, value_names, walk_graphs


@on_proto
def lower_integers(model: onnx.ModelProto) -> int:
    """Turn int64 inputs and outputs of the main graph into int32, in place.

    Returns:
        Number of inputs and outputs changed.
    """
    graph = model.graph
    rewriter = Rewriter(graph, value_names(graph))
    renamed: dict[str, str] = {}
    changed = 0
    for info in graph.input:
        if info.type.tensor_type.elem_type == TensorProto.INT64:
            info.type.tensor_type.elem_type = TensorProto.INT32
            renamed[info.name] = rewriter.node("Cast", [info.name], hint=f"{info.name}.int64", to=TensorProto.INT64)
            changed += 1
    outputs: dict[str, str] = {}
    for info in graph.output:
        if info.type.tensor_type.elem_type == TensorProto.INT64:
            info.type.tensor_type.elem_type = TensorProto.INT32
            outputs[info.name] = rewriter.fresh(f"{info.name}.int64")
            changed += 1
    head = list(rewriter.nodes)
    for node in graph.node:
        node.output[:] = [outputs.get(name, name) for name in node.output]
    mapping = renamed | outputs
    for inner in walk_graphs(graph):
        for node in inner.node:
            node.input[:] = [mapping.get(name, name) for name in node.input]
    rewriter.nodes = [*head, *graph.node]
    narrow = {wide: name for name, wide in renamed.items()}
    read = {name for inner in walk_graphs(graph) for node in inner.node for name in node.input}
    for name, wide in outputs.items():
        sums = [n for n in graph.node if n.op_type == "Add" and wide in n.output and set(n.input) <= set(narrow)]
        if sums and wide not in read:
            sums[0].input[:] = [narrow[n] for n in sums[0].input]
            sums[0].output[:] = [name]
        else:
            rewriter.node("Cast", [renamed.get(wide, wide)], name, to=TensorProto.INT32)
    rewriter.finish()
    for info in list(graph.value_info):
        if info.name in outputs:
            graph.value_info.remove(info)
    return changed
