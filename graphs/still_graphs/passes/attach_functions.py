"""Give every still:: node of a model its function body in standard ops.

requires: nodes in the order of their OpSpec, activation types inferable from the graph; no functions of the domain yet.
ensures: each node names a function of the model (domain, op type, overload); bodies are shared by nodes that agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions import function_body
from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN, OPS, OpSpec
from still_graphs.ops.spec import CACHE, StateSpec, TensorSpec, dimension
from still_graphs.passes.walk import attribute

_Key = tuple[str, bytes, tuple[bool, ...], tuple[bool, ...], int, int, tuple[tuple[str, int], ...]]
_Types = dict[str, tuple[int, tuple[int | None, ...]]]


@on_proto
def attach_functions(model: onnx.ModelProto, onnxruntime: bool = False) -> int:
    """Attach a function to every still:: node of the main graph, in place; nodes that agree in attributes, present inputs and
    outputs and element type share one.

    Args:
        onnxruntime: For ONNX Runtime alone: bodies may have its own ops.

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
        _drop_scales(node)
        dtype, dims = _activation_type(node, types), _dimensions(node, types)
        kept = _kept_type(node, types) or dtype
        key = _key(node, dtype, kept, dims)
        if key not in found:
            function = function_body(node, dtype, opset, kept=kept, dims=dims, onnxruntime=onnxruntime)
            # The first function of an op needs no overload; tools that do not know overloads can read it.
            overload = next(o for o in _overloads() if (function.domain, function.name, o) not in used)
            used.add((function.domain, function.name, overload))
            function.overload = overload
            model.functions.append(function)
            known = {o.domain for o in model.opset_import}
            model.opset_import.extend(o for o in function.opset_import if o.domain not in known)
            found[key] = overload
        node.overload = found[key]
    return len(found)


def _overloads() -> Iterator[str]:
    yield ""
    number = 1
    while True:
        yield str(number)
        number += 1


def _key(node: onnx.NodeProto, dtype: int, kept: int, dims: dict[str, int]) -> _Key:
    attributes = b"".join(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
    return (
        node.op_type,
        attributes,
        tuple(map(bool, node.input)),
        tuple(map(bool, node.output)),
        dtype,
        kept,
        tuple(sorted(dims.items())),
    )


def _element_types(graph: onnx.GraphProto) -> _Types:
    """Element type and known dimensions of the values that the graph declares."""
    types: _Types = {i.name: (i.data_type, tuple(i.dims)) for i in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
        types[info.name] = tensor.elem_type, shape
    return types


def _spec(node: onnx.NodeProto) -> OpSpec:
    if node.op_type not in OPS:
        raise UnsupportedError(f"{DOMAIN}::{node.op_type} is no op of this version; known: {', '.join(sorted(OPS))}.")
    return OPS[node.op_type].resolve({CACHE.name: attribute(node, CACHE.name, CACHE.default)})


def _drop_scales(node: onnx.NodeProto) -> None:
    """Take the scales of caches in 8 bits, which come last, from a node that names them as absent: its function does not have them."""
    spec = _spec(node)
    for names, tensors in ((node.input, spec.all_inputs()), (node.output, spec.all_outputs())):
        if any(names[len(tensors) :]):
            raise UnsupportedError(
                f"{node.name or node.op_type}: {', '.join(names[len(tensors) :])} are beyond the {len(tensors)} tensors of the op, "
                f"which has scales with {CACHE.name}=int8 alone."
            )
        del names[len(tensors) :]


def _dimensions(node: onnx.NodeProto, types: _Types) -> dict[str, int]:
    """Sizes of the OpSpec's symbols that are fixed in the graph, and WH, the heads of the weights (1 = shared)."""
    spec = _spec(node)
    dims: dict[str, int] = {}
    for name, tensor in zip(node.input, spec.all_inputs(), strict=False):
        _, shape = types.get(name, (0, ()))
        for dim, size in zip(tensor.shape, shape, strict=False):
            if isinstance(dim, str) and size is not None:
                factor, symbol, divisor = dimension(dim)
                if factor > 1:
                    continue
                dims["WH" if tensor.role == "weight" and symbol == "H" and tensor.dtype == "T" else symbol] = (
                    size * divisor
                )
    return {symbol: size for symbol, size in dims.items() if symbol not in ("B", "T", "N")}


def _narrow(tensor: TensorSpec | StateSpec) -> bool:
    return isinstance(tensor, StateSpec) and tensor.narrow


def _kept_type(node: onnx.NodeProto, types: _Types) -> int:
    """Element type of the states that may be narrower than activations; 0: unknown, or the op has none."""
    spec = _spec(node)
    given = [*zip(node.input, spec.all_inputs(), strict=False), *zip(node.output, spec.all_outputs(), strict=False)]
    return next((types[name][0] for name, tensor in given if _narrow(tensor) and name in types), 0)


def _activation_type(node: onnx.NodeProto, types: _Types) -> int:
    """Element type of the activations: of any input or output that shares it (the weights, the output, state that may not be narrower)."""
    spec = _spec(node)
    kinds = [t.dtype for t in spec.inputs] + ["" if s.narrow else s.dtype for s in spec.states]
    for name, kind in zip(node.input, kinds, strict=False):
        if kind == "T" and name in types and types[name][0]:
            return types[name][0]
    for name, tensor in zip(node.output, spec.all_outputs(), strict=False):
        if tensor.dtype == "T" and not _narrow(tensor) and name in types and types[name][0]:
            return types[name][0]
    # Where nothing else is declared, states are as the activations.
    if kept := _kept_type(node, types):
        return kept
    raise UnsupportedError(
        f"node {node.name or node.op_type}: the type of its activations is unknown; no input or output of it is declared. "
        "Run onnx.shape_inference before attaching functions."
    )
