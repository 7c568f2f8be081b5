"""Put the function bodies of still:: nodes in their place, for runtimes without plugins and without local functions.

requires: every still:: node names a function of the model.
ensures: no function and no still:: node is left.
"""

from __future__ import annotations

from still_graphs.edits import drop_unused
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN


def inline_functions(model: ir.Model) -> int:
    """Inline all local functions, in place.

    Raises:
        UnsupportedError: A still:: node has no function.
    """
    from onnx_ir.passes.common import InlinePass

    count = sum(node.domain == DOMAIN for node in model.graph.all_nodes())
    for function in model.functions.values():
        for node in function.all_nodes():  # InlinePass numbers unnamed nodes from 2 on, each time
            node.name = node.name or node.outputs[0].name
    InlinePass()(model)
    left = next((node for node in model.graph.all_nodes() if node.domain == DOMAIN), None)
    if left is not None:
        raise UnsupportedError(
            f"node {left.name or left.outputs[0].name}: {DOMAIN}::{left.op_type} has no function body in this model. "
            "Attach the functions before inlining."
        )
    drop_unused(model.graph)  # a body uses what its node lacks
    model.graph.opset_imports.pop(DOMAIN, None)
    return count
