"""Compute projections of one value as one product: their weights side by side, the result split.

Query, key, value and gate projections read the same tokens, and so do the two of a gated feed-forward layer. One product of all columns
reads memory in longer runs and leaves fewer kernels. TensorRT merges such products where weights are constants that it may rewrite; an
engine whose weights can be replaced merges none. A graph with quantized weights is left alone: its products were merged when they were
quantized, and the names of their weights say what they hold.

requires: the weights' values in the graph, not in files beside it.
ensures: without quantized weights no two MatMul nodes of one graph share their first input and have weights of their own, of one type and
height.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from still_graphs.passes.walk import Rewriter, initializers, value_names, walk_graphs, walk_nodes


def merge_projections(model: onnx.ModelProto) -> int:
    """Merge products in place; outputs keep their names.

    Returns:
        Number of products that are gone.
    """
    if any(node.op_type == "DequantizeLinear" for node in model.graph.node):
        return 0
    used = value_names(model.graph)
    uses: dict[str, int] = {}
    for node in walk_nodes(model.graph):
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    return sum(_merge(graph, used, uses) for graph in walk_graphs(model.graph))


def _merge(graph: onnx.GraphProto, used: set[str], uses: dict[str, int]) -> int:
    weights = initializers(graph)
    groups: dict[tuple[str, int, int], list[onnx.NodeProto]] = {}
    for node in graph.node:
        weight = weights.get(node.input[1]) if node.op_type == "MatMul" and node.domain == "" else None
        # A weight that is used elsewhere stays; beside a merged copy it would be there twice.
        if weight is not None and len(weight.dims) == 2 and uses[weight.name] == 1:
            groups.setdefault((node.input[0], weight.data_type, weight.dims[0]), []).append(node)
    merged = {group[0].output[0]: group for group in groups.values() if len(group) > 1}
    if not merged:
        return 0
    later = {node.output[0] for group in merged.values() for node in group[1:]}
    rewriter = Rewriter(graph, used)
    gone: set[str] = set()
    for node in graph.node:
        if node.output and node.output[0] in later:
            continue
        group = merged.get(node.output[0]) if node.output else None
        if group is None:
            rewriter.nodes.append(node)
            continue
        parts = [weights[member.input[1]] for member in group]
        columns = np.concatenate([numpy_helper.to_array(part) for part in parts], axis=1)
        name = rewriter.fresh(f"{parts[0].name}.merged")
        graph.initializer.append(numpy_helper.from_array(columns, name))
        gone.update(part.name for part in parts)
        for part in parts:
            part.ClearField("raw_data")  # a large model is not held twice
        product = rewriter.node("MatMul", [node.input[0], name], hint=f"{node.output[0]}.merged")
        sizes = rewriter.constant([part.dims[1] for part in parts], "int64", f"{node.output[0]}.sizes")
        split = onnx.helper.make_node(
            "Split", [product, sizes], [member.output[0] for member in group], name=f"{product}/Split", axis=-1
        )
        rewriter.nodes.append(split)
    rewriter.finish()
    kept = [tensor for tensor in graph.initializer if tensor.name not in gone]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return len(later)
