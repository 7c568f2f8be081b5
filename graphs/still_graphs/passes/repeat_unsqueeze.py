"""Unsqueeze a value where it is used, once for each use.

Position embeddings are the same in every layer, so the exporter leaves one view of them with four dimensions. Where TensorRT 8.6
compiles the parts between plugins, such a view crosses all of them (see lower_plugin_nodes).

ensures: every Unsqueeze has one use.
"""

from __future__ import annotations

import onnx

from still_graphs.passes.walk import Rewriter, value_names, walk_graphs


def repeat_unsqueeze(model: onnx.ModelProto) -> int:
    """Repeat views in place.

    Returns:
        Number of nodes added.
    """
    used = value_names(model.graph)
    return sum(_repeat(graph, used) for graph in walk_graphs(model.graph))


def _repeat(graph: onnx.GraphProto, used: set[str]) -> int:
    views = {node.output[0]: node for node in graph.node if node.op_type == "Unsqueeze" and node.domain == ""}
    rewriter, seen, added = Rewriter(graph, used), set(), 0
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name not in views:
                continue
            if name in seen:
                node.input[index] = rewriter.node("Unsqueeze", views[name].input, hint=name)
                added += 1
            seen.add(name)
        rewriter.nodes.append(node)
    rewriter.finish()
    return added
