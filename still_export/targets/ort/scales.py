"""Scales of several rows, behind the norms that ONNX Runtime has a kernel for."""

from __future__ import annotations

import numpy as np

from still_graphs.edits import store
from still_graphs.later_ir import ir


def part_scales(model: ir.Model) -> int:
    """Let scales of several rows multiply behind their norms: ONNX Runtime's CUDA kernel takes the first row for all of them.

    Returns:
        Number of norms.
    """
    found = 0
    for node in list(model.graph):
        scale = node.inputs[1] if node.op_type == "RMSNormalization" and node.domain == "" else None
        if scale is None or scale.shape is None or len(scale.shape) == 1:
            continue
        assert scale.dtype is not None
        ones = np.ones(scale.shape.numpy()[-1:], scale.dtype.numpy())
        node.replace_input_with(1, store(model.graph, ir.tensor(ones, name=f"{node.name}.ones")))
        output = node.outputs[0]
        apart = ir.node("Mul", [output, scale], name=f"{node.name}.scaled")
        apart.outputs[0].dtype, apart.outputs[0].shape = scale.dtype, output.shape
        ir.convenience.replace_all_uses_with(output, apart.outputs[0])
        apart.replace_input_with(0, output)
        model.graph.insert_after(node, apart)
        found += 1
    return found
