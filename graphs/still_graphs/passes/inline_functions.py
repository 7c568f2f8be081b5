"""Put the function bodies of still:: nodes in their place, for runtimes without plugins and without local functions.

requires: every still:: node names a function of the model.
ensures: no function and no still:: node is left.
"""

from __future__ import annotations

import onnx
import onnx.inliner

from still_graphs.errors import UnsupportedError
from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.passes.walk import walk_nodes


@on_proto
def inline_functions(model: onnx.ModelProto) -> int:
    """Inline all local functions, in place.

    Returns:
        Number of still:: nodes that were inlined.

    Raises:
        UnsupportedError: A still:: node has no function.
    """
    count = sum(node.domain == DOMAIN for node in walk_nodes(model.graph))
    inlined = onnx.inliner.inline_local_functions(model)
    left = next((node for node in walk_nodes(inlined.graph) if node.domain == DOMAIN), None)
    if left is not None:
        raise UnsupportedError(
            f"node {left.name or left.output[0]}: {DOMAIN}::{left.op_type} has no function body in this model. "
            "Attach the functions before inlining."
        )
    model.CopyFrom(inlined)
    kept = [item for item in model.opset_import if item.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return count
