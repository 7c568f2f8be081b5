"""Replace NonZero, whose output size depends on data, by an enumeration of fixed size. TensorRT-RTX has no such operator.

Every place where the mask is false stands for the last place where it is true, so that scattering writes the same row twice.
Where the mask is false everywhere the scatters write what is there already.

requires: the indices of NonZero, transposed, lead only into GatherND and, through their indices, into ScatterND; masks have two axes.
ensures: no NonZero is left; results are the same.
"""

from __future__ import annotations

from collections.abc import Callable

from still_graphs.edits import Writer, attribute, fresh_names, graphs_of
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir


def replace_nonzero(model: ir.Model) -> int:
    """Rewrite every NonZero of the model, in place.

    Raises:
        UnsupportedError: The indices are used otherwise than required.
    """
    fresh = fresh_names(model.graph)
    return sum(_rewrite_graph(graph, fresh) for graph in graphs_of(model))


def _rewrite_graph(graph: ir.Graph, fresh: Callable[[str], str]) -> int:
    writer, count = Writer(graph, fresh), 0
    anywhere: dict[
        ir.Value | None, ir.Value
    ] = {}  # value -> whether any place is true of the NonZero that it depends on through indices
    for node in list(graph):
        source = next((anywhere[value] for value in node.inputs if value in anywhere), None)
        writer.place = node
        if node.op_type == "NonZero":
            places, any_true = _enumerate(writer, node)
            anywhere[places] = any_true
            count += 1
        elif source is not None and node.op_type == "ScatterND":
            if node.inputs[0] in anywhere or attribute(node, "reduction", "none") != "none":
                raise UnsupportedError(
                    f"node {node.outputs[0].name}: a ScatterND of rows that NonZero chose must replace rows."
                )
            _guard(writer, node, source)
        elif source is not None and node.op_type in ("Loop", "Scan", "If", "TopK", "ReduceSum", "ReduceMax"):
            raise UnsupportedError(
                f"node {node.outputs[0].name}: {node.op_type} of what NonZero chose cannot be rewritten."
            )
        elif source is not None:
            anywhere.update(dict.fromkeys(node.outputs, source))
    return count


def _enumerate(r: Writer, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The places [2, M] that replace `node`'s output, and a bool [1]: whether any place is true."""
    mask, hint = node.inputs[0], node.outputs[0].name
    ints = r.node("Cast", [mask], hint=f"{hint}.mask", to=ir.DataType.INT64)
    columns = r.node("Shape", [mask], hint=f"{hint}.columns", start=1, end=2)
    flat = r.node("Reshape", [ints, r.constant([-1], "int64")], hint=f"{hint}.flat")
    size = r.node("Squeeze", [r.node("Shape", [flat])], hint=f"{hint}.size")
    place = r.node("Range", [r.constant(0, "int64"), size, r.constant(1, "int64")], hint=f"{hint}.place")
    last = r.node("ReduceMax", [r.node("Mul", [flat, place])], hint=f"{hint}.last", keepdims=1)
    chosen = r.node("Where", [r.node("Cast", [flat], to=ir.DataType.BOOL), place, last], hint=f"{hint}.chosen")
    row = r.node("Div", [chosen, columns], hint=f"{hint}.row")
    column = r.node("Sub", [chosen, r.node("Mul", [row, columns])], hint=f"{hint}.column")
    axis = r.constant([0], "int64")
    pair = [r.node("Unsqueeze", [row, axis]), r.node("Unsqueeze", [column, axis])]
    most = r.node("ReduceMax", [flat], hint=f"{hint}.most", keepdims=1)
    any_true = r.node("Cast", [most], hint=f"{hint}.any", to=ir.DataType.BOOL)
    return r.instead(node, "Concat", pair, axis=0), any_true


def _guard(r: Writer, node: ir.Node, any_true: ir.Value) -> None:
    """Let a scatter rewrite the present rows unless some place is true; indices stay at least 0."""
    (data, index, updates), name = node.inputs, node.outputs[0].name
    safe = r.node("Max", [index, r.constant(0, "int64")], hint=f"{name}.index")
    there = r.node("GatherND", [data, safe], hint=f"{name}.there")
    node.replace_input_with(1, safe)
    node.replace_input_with(2, r.node("Where", [any_true, updates, there], hint=f"{name}.rows"))
