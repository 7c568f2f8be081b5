"""Replace NonZero, whose output size depends on data, by an enumeration of fixed size. TensorRT-RTX has no such operator.

Every place where the mask is false stands for the last place where it is true, so that scattering writes the same row twice.
Where the mask is false everywhere the scatters write what is there already.

requires: the indices of NonZero, transposed, lead only into GatherND and, through their indices, into ScatterND; masks have two axes.
ensures: no NonZero is left; results are the same.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from still_graphs.errors import UnsupportedError
from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import Rewriter, attribute, value_names, walk_graphs


@on_proto
def replace_nonzero(model: onnx.ModelProto) -> int:
    """Rewrite every NonZero of the model, in place.

    Returns:
        Number of NonZero nodes replaced.

    Raises:
        UnsupportedError: The indices are used otherwise than required.
    """
    used = value_names(model.graph)
    return sum(_rewrite_graph(graph, used) for graph in walk_graphs(model.graph))


def _rewrite_graph(graph: onnx.GraphProto, used: set[str]) -> int:
    targets = [node for node in graph.node if node.op_type == "NonZero"]
    if not targets:
        return 0
    masks = {node.output[0]: node.input[0] for node in targets}
    derived = {name: name for name in masks}  # value -> the NonZero that it depends on through indices
    rewriter = Rewriter(graph, used)
    anywhere: dict[str, str] = {}
    for node in graph.node:
        source = next((derived[name] for name in node.input if name in derived), None)
        if node.op_type == "NonZero":
            anywhere[node.output[0]] = _enumerate(rewriter, node)
            continue
        if source is not None and node.op_type == "ScatterND":
            if node.input[0] in derived or attribute(node, "reduction", "none") != "none":
                raise UnsupportedError(
                    f"node {node.output[0]}: a ScatterND of rows that NonZero chose must replace rows."
                )
            _guard(rewriter, node, anywhere[source])
            continue
        if source is not None and node.op_type in ("NonZero", "Loop", "Scan", "If", "TopK", "ReduceSum", "ReduceMax"):
            raise UnsupportedError(f"node {node.output[0]}: {node.op_type} of what NonZero chose cannot be rewritten.")
        if source is not None:
            derived.update(dict.fromkeys(node.output, source))
        rewriter.nodes.append(node)
    rewriter.finish()
    return len(targets)


def _enumerate(r: Rewriter, node: onnx.NodeProto) -> str:
    """Write the places [2, M] in the name of `node`'s output; the name of a bool [1]: any place is true."""
    mask, hint = node.input[0], node.output[0]
    ints = r.node("Cast", [mask], hint=f"{hint}.mask", to=TensorProto.INT64)
    columns = r.node("Shape", [mask], hint=f"{hint}.columns", start=1, end=2)
    flat = r.node("Reshape", [ints, r.constant([-1], "int64")], hint=f"{hint}.flat")
    size = r.node("Squeeze", [r.node("Shape", [flat])], hint=f"{hint}.size")
    place = r.node("Range", [r.constant(0, "int64"), size, r.constant(1, "int64")], hint=f"{hint}.place")
    last = r.node("ReduceMax", [r.node("Mul", [flat, place])], hint=f"{hint}.last", keepdims=1)
    chosen = r.node("Where", [r.node("Cast", [flat], to=TensorProto.BOOL), place, last], hint=f"{hint}.chosen")
    row = r.node("Div", [chosen, columns], hint=f"{hint}.row")
    column = r.node("Sub", [chosen, r.node("Mul", [row, columns])], hint=f"{hint}.column")
    axis = r.constant([0], "int64")
    r.node("Concat", [r.node("Unsqueeze", [row, axis]), r.node("Unsqueeze", [column, axis])], hint, axis=0)
    most = r.node("ReduceMax", [flat], hint=f"{hint}.most", keepdims=1)
    return r.node("Cast", [most], hint=f"{hint}.any", to=TensorProto.BOOL)


def _guard(r: Rewriter, node: onnx.NodeProto, any_true: str) -> None:
    """Let a scatter write the rows that are there unless some place is true; indices are kept from below 0."""
    data, index, updates = node.input
    safe = r.node("Max", [index, r.constant(0, "int64")], hint=f"{node.output[0]}.index")
    there = r.node("GatherND", [data, safe], hint=f"{node.output[0]}.there")
    rows = r.node("Where", [any_true, updates, there], hint=f"{node.output[0]}.rows")
    node.input[:] = [data, safe, rows]
    r.nodes.append(node)
