"""Give every still:: node of a model its function body in standard ops.

requires: nodes in the order of their OpSpec, activation types inferable from the graph; no functions of the domain yet.
ensures: each node names a function of the model (domain, op type, overload); bodies are shared by nodes that agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from still_graphs.edits import attribute, sizes
from still_graphs.errors import UnsupportedError, unknown
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS, OpSpec
from still_graphs.spec import CACHE, StateSpec, TensorSpec, dimension


def attach_functions(model: ir.Model, onnxruntime: bool = False) -> int:
    """Attach a function to every still:: node of the main graph, in place.

    Nodes with equal attributes, present inputs and outputs, and element type share one function.

    Args:
        onnxruntime: Bodies may use ONNX Runtime's own ops.

    Raises:
        UnsupportedError: No body for a node, or its activations' type is unknown.
    """
    from still_graphs.functions import function_body

    found: dict[Any, str] = {}
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        _drop_scales(node)
        dtype, dims = _activation_type(node), _dimensions(node)
        narrow_dtype = _narrow_type(node) or dtype
        proto = ir.to_proto(node)
        key = (
            node.op_type,
            b"".join(sorted(a.SerializeToString(deterministic=True) for a in proto.attribute)),
            tuple(map(bool, proto.input)),
            tuple(map(bool, proto.output)),
            dtype,
            narrow_dtype,
            tuple(sorted(dims.items())),
        )
        if key not in found:
            opset = model.opset_imports.get("", 0)
            body = function_body(proto, dtype, opset, narrow_dtype=narrow_dtype, dims=dims, onnxruntime=onnxruntime)
            # The first function of an op needs no overload, so tools without support for overloads can read it.
            overloads = itertools.chain([""], map(str, itertools.count(1)))
            body.overload = next(o for o in overloads if (body.domain, body.name, o) not in model.functions)
            function = ir.serde.deserialize_function(body)
            model.functions[function.identifier()] = function
            for domain, version in function.opset_imports.items():
                model.opset_imports.setdefault(domain, version)
            found[key] = function.overload
        node.overload = found[key]
    return len(found)


def _spec(node: ir.Node) -> OpSpec:
    if node.op_type not in OPS:
        raise unknown(node.op_type, sorted(OPS), f"{DOMAIN}::{node.op_type}", UnsupportedError)
    return OPS[node.op_type].resolve({CACHE.name: attribute(node, CACHE.name, CACHE.default)})


def _drop_scales(node: ir.Node) -> None:
    """Drop absent scales of 8-bit caches, the last inputs and outputs of a node; its function lacks them."""
    spec = _spec(node)
    for values, tensors, resize in (
        (node.inputs, spec.all_inputs(), node.resize_inputs),
        (node.outputs, spec.all_outputs(), node.resize_outputs),
    ):
        if extra := [str(v.name) for v in values[len(tensors) :] if v is not None and v.name]:
            raise UnsupportedError(
                f"{node.name or node.op_type}: {', '.join(extra)} are beyond the {len(tensors)} tensors of the op, "
                f"which has scales with {CACHE.name}=int8 alone."
            )
        resize(min(len(values), len(tensors)))


def _dimensions(node: ir.Node) -> dict[str, int]:
    """Sizes of the OpSpec's symbols that are fixed in the graph, and WH, the number of weight heads (1 = shared)."""
    spec = _spec(node)
    dims: dict[str, int] = {}
    for value, tensor in zip(node.inputs, spec.all_inputs(), strict=False):
        for dim, size in zip(tensor.shape, [] if value is None else sizes(value), strict=False):
            if isinstance(dim, str) and isinstance(size, int):
                factor, symbol, divisor = dimension(dim)
                if factor > 1:
                    continue
                dims["WH" if tensor.role == "weight" and symbol == "H" and tensor.dtype == "T" else symbol] = (
                    size * divisor
                )
    return {symbol: size for symbol, size in dims.items() if symbol not in ("B", "T", "N")}


def _declared(node: ir.Node, wanted: Callable[[TensorSpec | StateSpec], bool]) -> int:
    """Element type of the first input or output that satisfies `wanted` and declares one; 0: none does."""
    spec = _spec(node)
    values = [*zip(node.inputs, spec.all_inputs(), strict=False), *zip(node.outputs, spec.all_outputs(), strict=False)]
    return next((int(v.dtype) for v, tensor in values if v is not None and v.dtype is not None and wanted(tensor)), 0)


def _narrow_type(node: ir.Node) -> int:
    """Element type of inputs that may be narrower than activations; 0: unknown, or none."""
    return _declared(node, lambda tensor: tensor.narrow)


def _activation_type(node: ir.Node) -> int:
    """Element type of the activations, from any input or output of type "T" that is not `narrow`."""
    # If nothing else declares a type, states have the activations'.
    if found := _declared(node, lambda tensor: tensor.dtype == "T" and not tensor.narrow) or _narrow_type(node):
        return found
    if not any(t.dtype == "T" for t in (*_spec(node).all_inputs(), *_spec(node).all_outputs())):
        return int(ir.DataType.FLOAT)  # an op of integers
    raise UnsupportedError(
        f"node {node.name or node.op_type}: the type of its activations is unknown; no input or output of it is declared. "
        "Run onnx.shape_inference before attaching functions."
    )
