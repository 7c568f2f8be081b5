"""Compute activations in float32: the input is cast before the node, and the result is cast back.

ONNX Runtime's CUDA kernels compute each step of an activation in its type: log(e^x + 1) of float16 has a resolution of 2^-10, so a
softplus of 0.01, a usual step of Mamba, errs by 5%; 1 - 1 / (1 + e^x) of float16 leaves no digits of a sigmoid below 2^-11. PyTorch rounds
the result alone. The CPU provider casts around them by itself.

requires: known types of their inputs.
ensures: no node of these operators in the main graph has a 16-bit input.
"""

from __future__ import annotations

from collections.abc import Collection

from still_graphs.edits import Writer, is_standard
from still_graphs.later_ir import ir

OF_STEPS = ("Celu", "Elu", "Gelu", "Mish", "Selu", "Sigmoid", "Softplus", "Swish")
"""Operators that cancel digits between e^x and their result."""


def widen_activations(model: ir.Model, ops: Collection[str] = OF_STEPS) -> int:
    """Insert casts around the nodes of `ops` in the main graph, in place."""
    writer = Writer(model.graph)
    narrow = [node for node in model.graph if is_standard(node, *ops) and _dtype(node) not in (None, ir.DataType.FLOAT)]
    for node in narrow:
        writer.place, output, dtype = node, node.outputs[0].name, _dtype(node)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        wide = writer.node("Cast", [node.inputs[0]], hint=f"{output}.wide", to=ir.DataType.FLOAT)
        result = writer.node(node.op_type, [wide], hint=f"{output}.exact", **attributes)
        writer.instead(node, "Cast", [result], to=dtype)
    return len(narrow)


def activations_are_wide(model: ir.Model) -> str:
    """Check that none is computed in 16 bits."""
    left = [
        str(n.name) for n in model.graph if is_standard(n, *OF_STEPS) and _dtype(n) not in (None, ir.DataType.FLOAT)
    ]
    return f"activations in 16 bits, {', '.join(left[:3])}" if left else ""


def activations_are_typed(model: ir.Model) -> str:
    """Check that their inputs have types."""
    left = [str(n.name) for n in model.graph if is_standard(n, *OF_STEPS) and _dtype(n) is None]
    return f"activations of unknown type, {', '.join(left[:3])}" if left else ""


def _dtype(node: ir.Node) -> ir.DataType | None:
    value = node.inputs[0]
    return None if value is None else value.dtype
