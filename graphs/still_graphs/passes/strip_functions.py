"""Remove the function bodies of still:: nodes, for hosts where those nodes are plugins.

TensorRT's parser prefers a local function over a plugin and falls back to it silently: a graph for plugins must have none.

requires: nothing.
ensures: no function of the domain is left, no still:: node names an overload, and an import that only bodies used is kept.
"""

from __future__ import annotations

import onnx

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.passes.walk import walk_nodes


@on_proto
def strip_functions(model: onnx.ModelProto) -> int:
    """Remove the domain's functions, in place.

    Returns:
        Number of functions removed and overloads cleared.
    """
    kept = [f for f in model.functions if f.domain != DOMAIN]
    changed = len(model.functions) - len(kept)
    del model.functions[:]
    model.functions.extend(kept)
    for node in walk_nodes(model.graph):
        if node.domain == DOMAIN and node.overload:
            node.overload = ""
            changed += 1
    return changed
