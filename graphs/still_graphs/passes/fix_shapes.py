"""Give every Reshape a constant shape: dimensions that its input has too are copied, the others are numbers.

Exporters compute shapes while the model runs: batch and tokens from the model's inputs, the heads as what is left (-1). A compiler cannot
tell then that two values have the same dimensions. TensorRT 8.6 reserved (batch * tokens)^2 rows where such values meet.

requires: value_info with names for the free dimensions.
ensures: a Reshape of the main graph has a constant shape unless it merges, splits or moves a free dimension.
"""

from __future__ import annotations

import onnx

from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import Rewriter, constant_value, dimensions, drop_attribute, drop_unused, value_names


@on_proto
def fix_shapes(model: onnx.ModelProto) -> int:
    """Replace computed shapes by constants, in place.

    Returns:
        Number of Reshape nodes changed.
    """
    graph = model.graph
    dims, rewriter, changed = dimensions(graph), Rewriter(graph, value_names(graph)), 0
    for node in graph.node:
        if node.op_type == "Reshape" and node.domain == "":
            now = constant_value(graph, node.input[1])
            shape = _copied(dims.get(node.input[0], []), dims.get(node.output[0], []))
            if shape and (now is None or (now < 0).any()):
                node.input[1] = rewriter.constant(shape, "int64", f"{node.output[0]}.shape")
                drop_attribute(node, "allowzero")  # 0 copies
                changed += 1
        rewriter.nodes.append(node)
    rewriter.finish()
    drop_unused(graph)
    return changed


def _copied(given: list[int | str | None], wanted: list[int | str | None]) -> list[int]:
    """The shape as Reshape takes it, 0 for a dimension that is copied; nothing where one is neither known nor copied."""
    shape = []
    for axis, size in enumerate(wanted):
        if isinstance(size, int) and size > 0:
            shape.append(size)
        elif isinstance(size, str) and axis < len(given) and given[axis] == size:
            shape.append(0)
        else:
            return []
    return shape
