"""Compute all Sigmoids and Softplus in float32 if one of them is.

TensorRT 8.6 compiles a sigmoid as 1 / (1 + e^-x) and shares the constant 1 among all sigmoids of a part of the model. If one is float32
and another float16, as in gates and feed-forward layers, it "could not infer output types" and finds no kernels for the part.

requires: known types of their inputs.
ensures: nodes of these operators in the main graph are all float32, or none is.
"""

from __future__ import annotations

from still_graphs.edits import is_standard
from still_graphs.later_ir import ir
from still_graphs.passes.widen_activations import widen_activations

BENT = ("Sigmoid", "Softplus")
"""Operators made of e^x and 1."""


def widen_sigmoids(model: ir.Model) -> int:
    """Insert casts around them, in place."""
    return widen_activations(model, BENT) if sigmoids_of_one_type(model) else 0


def sigmoids_of_one_type(model: ir.Model) -> str:
    """Check that sigmoids have one type."""
    types = {n.inputs[0].dtype for n in model.graph if is_standard(n, *BENT) and n.inputs[0] is not None}
    types.discard(None)
    return (
        f"nodes of {' and '.join(BENT)} in {len(types)} types" if ir.DataType.FLOAT in types and len(types) > 1 else ""
    )
