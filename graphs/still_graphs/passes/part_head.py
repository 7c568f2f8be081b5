"""Split a graph with a joined MTP head in two, by the names of inputs, outputs and states.

requires: what a head has begins with `mtp_`, behind `past_` and `present_`.
ensures: no node, function or weight of the other's.
"""

from __future__ import annotations

from still_graphs.later_ir import ir
from still_graphs.states import AHEAD, LAST_HIDDEN


def has_head(model: ir.Model) -> bool:
    return any(_of_head(str(value.name)) for value in model.graph.outputs)


def part_head(model: ir.Model, head: bool) -> ir.Model:
    """`model` without the head, or the head alone; in place."""
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

    for values in (model.graph.inputs, model.graph.outputs):
        values[:] = [value for value in values if _of_head(str(value.name)) == head]
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    return model


def leave_head(model: ir.Model) -> int:
    """Remove the head and the outputs for it, in place; 0: there is none."""
    if not has_head(model):
        return 0
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name != LAST_HIDDEN]
    part_head(model, head=False)
    return 1


def no_head(model: ir.Model) -> str:
    return "a head that guesses tokens ahead" if has_head(model) else ""


def _of_head(name: str) -> bool:
    return name.removeprefix("past_").removeprefix("present_").startswith(AHEAD)
