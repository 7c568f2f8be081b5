"""Give every still:: node of a model its function body in standard ops.

requires: nodes in the order of their OpSpec, activation types inferable from the graph; no functions of the domain yet.
ensures: each node names a function of the model (domain, op type, overload); bodies are shared by nodes that agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions import function_body
from still_graphs.opset import DOMAIN, OPS

_Key = tuple[str, bytes, tuple[bool, ...], tuple[bool, ...], int]


def attach_functions(model: onnx.ModelProto) -> int:
    """Attach a function to every still:: node of the main graph, in place; nodes that agree in attributes, present inputs and
    outputs and element type share one.

    Returns:
        Number of functions added.

    Raises:
        UnsupportedError: No body for a node, or its activations' type cannot be told.
    """
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    found: dict[_Key, str] = {}
    used = {(f.domain, f.name, f.overload) for f in model.functions}
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    if not nodes:
        return 0
    types = _element_types(model.graph)
    for node in nodes:
        dtype = _activation_type(node, types)
        key = _key(node, dtype)
        if key not in found:
            function = function_body(node, dtype, opset)
            # The first function of an op needs no overload; tools that do not know overloads can read it.
            overload = next(o for o in _overloads() if (function.domain, function.name, o) not in used)
            used.add((function.domain, function.name, overload))
            function.overload = overload
            model.functions.append(function)
            found[key] = overload
        node.overload = found[key]
    return len(found)


def _overloads() -> Iterator[str]:
    yield ""
    number = 1
    while True:
        yield str(number)
        number += 1


def _key(node: onnx.NodeProto, dtype: int) -> _Key:
    attributes = b"".join(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
    return node.op_type, attributes, tuple(map(bool, node.input)), tuple(map(bool, node.output)), dtype


def _element_types(graph: onnx.GraphProto) -> dict[str, int]:
    types = {i.name: i.data_type for i in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        types[info.name] = info.type.tensor_type.elem_type
    return types


def _activation_type(node: onnx.NodeProto, types: dict[str, int]) -> int:
    """Element type of the activations: of any input or output that shares it (all state of type T, the weights, the output)."""
    spec = OPS.get(node.op_type)
    if spec is None:
        raise UnsupportedError(f"{DOMAIN}::{node.op_type} is no op of this version; known: {', '.join(sorted(OPS))}.")
    kinds = [t.dtype for t in spec.inputs] + [s.dtype for s in spec.states]
    for name, kind in zip(node.input, kinds, strict=False):
        if kind == "T" and types.get(name):
            return types[name]
    for name, tensor in zip(node.output, (*spec.outputs, *spec.states), strict=False):
        if tensor.dtype == "T" and types.get(name):
            return types[name]
    raise UnsupportedError(
        f"node {node.name or node.op_type}: the type of its activations is unknown; no input or output of it is declared. "
        "Run onnx.shape_inference before attaching functions."
    )
