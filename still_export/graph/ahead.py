"""A model and its MTP head (which guesses tokens ahead) as one graph with shared weights; `part_head` splits it in two."""

from __future__ import annotations

import onnx_ir as ir

from still_export.models.ahead import PREFIX, SHARED
from still_graphs.states import AHEAD, State, StateTable


def ahead_name(name: str, layers: int) -> str:
    """Name of a head's input, output or state in the joint graph; its layers are numbered after the model's."""
    side = next((side for side in ("past_", "present_") if name.startswith(side) and "." in name), "")
    state, dot, layer = name.removeprefix(side).rpartition(".")
    return f"{side}{AHEAD}{state}.{layers + int(layer)}" if dot else f"{AHEAD}{name}"


def ahead_states(table: StateTable, layers: int, channels: int) -> list[State]:
    """The head's states in the joint graph, from its own table, with the hidden vector of the last token."""
    own = [
        State(ahead_name(s.name, layers), layers + s.layer, s.op, s.shape, s.dtype, s.in_place, s.growth) for s in table
    ]
    return [*own, State(ahead_name("hidden.0", layers), layers, "", ("batch", channels), "float32", True)]


def join_head(model: ir.Model, head: ir.Model, layers: int) -> None:
    """Move the nodes of `head` into the model's graph, in place; shared weights are the model's."""
    graph, other = model.graph, head.graph
    nodes, taken = list(other), dict(other.initializers)
    named = {id(value) for value in (*other.inputs, *other.outputs)}
    for values, into in ((other.inputs, graph.inputs), (other.outputs, graph.outputs)):
        moved = list(values)
        values.clear()
        for value in moved:
            value.name = ahead_name(str(value.name), layers)
        into.extend(moved)
    other.remove(nodes)
    for name, value in taken.items():
        del other.initializers[name]
        if name in SHARED:
            ir.convenience.replace_all_uses_with(value, graph.initializers[name])
        else:
            value.name = f"{PREFIX}{name}"
            graph.initializers.add(value)
    for node in nodes:
        node.name = f"{PREFIX}{node.name}"
        for value in node.outputs:
            if value.name and id(value) not in named:
                value.name = f"{PREFIX}{value.name}"
    graph.extend(nodes)
    graph.opset_imports.update(other.opset_imports)
