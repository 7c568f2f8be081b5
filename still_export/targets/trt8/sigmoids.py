"""Compute all Sigmoids and Softplus in float32 if one of them is.

TensorRT 8.6 compiles a sigmoid as 1 / (1 + e^-x) and shares the constant 1 among all sigmoids of a part of the model. If one is float32
and another float16, as in gates and feed-forward layers, it "could not infer output types" and finds no kernels for the part.

requires: known types of their inputs.
ensures: nodes of these operators in the main graph are all float32, or none is.
"""

from __future__ import annotations

from still_graphs.edits import Writer, is_standard
from still_graphs.later_ir import ir

BENT = ("Sigmoid", "Softplus")
"""Operators made of e^x and 1."""


def widen_sigmoids(model: ir.Model) -> int:
    """Insert casts around them, in place."""
    float32, writer = ir.DataType.FLOAT, Writer(model.graph)
    bent = [(n, x.dtype) for n in model.graph if is_standard(n, *BENT) and (x := n.inputs[0]) is not None and x.dtype]
    narrow = [(node, dtype) for node, dtype in bent if dtype != float32]
    if len(narrow) == len(bent):
        return 0
    for node, dtype in narrow:
        writer.place, output = node, node.outputs[0].name
        wide = writer.node("Cast", [node.inputs[0]], hint=f"{output}.wide", to=float32)
        writer.instead(node, "Cast", [writer.node(node.op_type, [wide], hint=f"{output}.bent")], to=dtype)
    return len(narrow)


def sigmoids_of_one_type(model: ir.Model) -> str:
    """Check that sigmoids have one type."""
    types = {n.inputs[0].dtype for n in model.graph if is_standard(n, *BENT) and n.inputs[0] is not None}
    types.discard(None)
    return (
        f"nodes of {' and '.join(BENT)} in {len(types)} types" if ir.DataType.FLOAT in types and len(types) > 1 else ""
    )
