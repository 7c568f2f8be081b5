"""Replace every If of the inlined bodies by its else branch, the general one.

A body's then branch is a shortcut for plain decode steps; the else branch computes the same for every call. TensorRT-RTX 1.7 checks
the shapes of both branches for every call, so the shortcut's shapes would rule prefill out, and with a free batch its builder
fails outright.

requires: bodies are inlined; the else branch of every If holds for the cases of its then branch too.
ensures: no If is left; results are the same.
"""

from __future__ import annotations

import onnx

from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import Rewriter, attribute, value_names


@on_proto
def take_general_branches(model: onnx.ModelProto) -> int:
    """Splice the else branches into the main graph, in place.

    Returns:
        Number of If nodes replaced.
    """
    graph = model.graph
    rewriter = Rewriter(graph, value_names(graph))
    changed = 0
    pending = list(graph.node)[::-1]
    while pending:
        node = pending.pop()
        if node.op_type != "If" or node.domain not in ("", "ai.onnx"):
            rewriter.nodes.append(node)
            continue
        branch = attribute(node, "else_branch")
        ends = [
            onnx.helper.make_node("Identity", [inner.name], [outer])
            for inner, outer in zip(branch.output, node.output, strict=True)
        ]
        graph.initializer.extend(branch.initializer)
        pending.extend([*branch.node, *ends][::-1])
        changed += 1
    rewriter.finish()
    return changed
