"""Replace each If of the inlined bodies by its else branch, the general one.

The then branch of a body is a shortcut for plain decode steps; the else branch computes the same for every call. TensorRT-RTX 1.7 checks
the shapes of both branches for every call, so the shortcut's shapes would exclude prefill, and with a free batch its builder fails.

requires: bodies are inlined; the else branch of each If covers the cases of its then branch.
ensures: no If is left; results are the same.
"""

from __future__ import annotations

from still_graphs.edits import is_standard, put_in_place
from still_graphs.later_ir import ir


def take_general_branches(model: ir.Model) -> int:
    """Move the nodes of the else branches into the main graph, in place."""
    graph, changed = model.graph, 0
    while node := next((n for n in graph if is_standard(n, "If")), None):
        branch = node.attributes["else_branch"].as_graph()
        results, inner = list(branch.outputs), list(branch)
        weights = list(branch.initializers.values())
        branch.outputs.clear()
        branch.initializers.clear()
        branch.remove(inner)
        for weight in weights:
            graph.initializers.add(weight)
        graph.insert_before(node, inner)
        for old, new in zip(list(node.outputs), results, strict=True):
            put_in_place(old, new)
        graph.remove(node, safe=True)
        changed += 1
    return changed
