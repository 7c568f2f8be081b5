"""Remove the function bodies of still:: nodes, for runtimes where these nodes are plugins.

TensorRT's parser silently prefers a local function to a plugin, so a graph for plugins must have none.

requires: nothing.
ensures: no function of the domain is left, no still:: node names an overload, and an import that only bodies used stays.
"""

from __future__ import annotations

from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN


def strip_functions(model: ir.Model) -> int:
    """Remove the domain's functions, in place."""
    gone = [key for key, function in model.functions.items() if function.domain == DOMAIN]
    for key in gone:
        del model.functions[key]
    named = [node for node in model.graph.all_nodes() if node.domain == DOMAIN and node.overload]
    for node in named:
        node.overload = ""
    return len(gone) + len(named)
