"""Give every Reshape a constant shape. Dimensions equal to the input's are copied; the others are numbers.

Exporters compute shapes at run time: batch and tokens from the model's inputs, the heads as the rest (-1). A compiler then cannot prove
that two values have equal dimensions. TensorRT 8.6 reserved (batch * tokens)^2 rows where such values meet.

requires: value_info with names for the free dimensions.
ensures: a Reshape of the main graph has a constant shape unless it merges, splits or moves a free dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.edits import Writer, constant_value, drop_unused, is_standard, sizes
from still_graphs.later_ir import ir


def fix_shapes(model: ir.Model) -> int:
    """Replace computed shapes by constants, in place."""
    found, writer = _computed(model.graph), Writer(model.graph)
    for node, shape in found:
        writer.place = node
        node.replace_input_with(1, writer.constant(shape, "int64", f"{node.outputs[0].name}.shape"))
        node.attributes.pop("allowzero", None)  # 0 copies
    drop_unused(model.graph)
    return len(found)


def fixed_shapes(model: ir.Model) -> str:
    """No Reshape computes a known shape."""
    left = [str(node.name) for node, _ in _computed(model.graph)]
    return f"Reshape nodes with a computed shape, {', '.join(left[:3])}" if left else ""


def _computed(graph: ir.Graph) -> list[tuple[ir.Node, list[int]]]:
    """Reshapes with a computed shape that could be constant, with that constant."""
    found = []
    for node in graph:
        if is_standard(node, "Reshape"):
            source, now = node.inputs[0], constant_value(node.inputs[1])
            shape = None if source is None else _copied(sizes(source), sizes(node.outputs[0]))
            if shape and (now is None or (now < 0).any()):
                found.append((node, shape))
    return found


def _copied(dims: Sequence[int | str | None], target: Sequence[int | str | None]) -> list[int]:
    """The shape input of Reshape, 0 for a copied dimension; None if a dimension is neither known nor copied."""
    shape = []
    for axis, size in enumerate(target):
        if isinstance(size, int) and size > 0:
            shape.append(size)
        elif isinstance(size, str) and axis < len(dims) and dims[axis] == size:
            shape.append(0)
        else:
            return []
    return shape
