"""Make two graphs of a model's into which a head that guesses tokens ahead was joined: inputs, outputs and states say whose they are.

requires: what a head has begins with `mtp_`, behind `past_` and `present_`.
ensures: no node, function or weight of the other's.
"""

from __future__ import annotations

from still_graphs.later_ir import ir
from still_graphs.states import AHEAD


def has_head(model: ir.Model) -> bool:
    """Whether one was joined into it."""
    return any(_of_head(str(value.name)) for value in model.graph.outputs)


def part_head(model: ir.Model, head: bool) -> ir.Model:
    """`model` without the head, or the head alone; in place."""
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass  # those who only look have none

    for values in (model.graph.inputs, model.graph.outputs):
        values[:] = [value for value in values if _of_head(str(value.name)) == head]
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    return model


def _of_head(name: str) -> bool:
    return name.removeprefix("past_").removeprefix("present_").startswith(AHEAD)
