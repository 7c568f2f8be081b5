"""Split norms whose scale has several rows, which ONNX Runtime's kernels do not support."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from still_graphs.edits import is_standard, store
from still_graphs.later_ir import ir


def part_scales(model: ir.Model) -> int:
    """Multiply scales of several rows after their norms: ONNX Runtime's CUDA kernel uses the first row for all."""
    norms = list(_norms(model))
    for node, scale in norms:
        assert scale.shape is not None and scale.dtype is not None
        ones = np.ones(scale.shape.numpy()[-1:], scale.dtype.numpy())
        node.replace_input_with(1, store(model.graph, ir.tensor(ones, name=f"{node.name}.ones")))
        output = node.outputs[0]
        apart = ir.node("Mul", [output, scale], name=f"{node.name}.scaled")
        apart.outputs[0].dtype, apart.outputs[0].shape = scale.dtype, output.shape
        ir.convenience.replace_all_uses_with(output, apart.outputs[0])
        apart.replace_input_with(0, output)
        model.graph.insert_after(node, apart)
    return len(norms)


def scales_of_one_row(model: ir.Model) -> str:
    """Norms have scales of one row."""
    left = [str(node.name) for node, _ in _norms(model)]
    return f"norms with scales of several rows, {', '.join(left[:3])}" if left else ""


def _norms(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Norms whose scale has several rows, and the scale."""
    for node in model.graph:
        scale = node.inputs[1] if is_standard(node, "RMSNormalization") else None
        if scale is not None and scale.shape is not None and len(scale.shape) > 1:
            yield node, scale
