"""Function bodies of the ops, in standard ONNX ops.

A body is written for one combination of attributes, present optional inputs and element type. `function_body` finds the writer by
the op's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import onnx
from onnx import helper

from still_graphs.errors import UnsupportedError, unknown
from still_graphs.functions.builder import Body
from still_graphs.functions.codes import has_codes, keep_codes, rename, without_scales
from still_graphs.ops import FUSED_OPSET, OPS

OPSETS = (23, 24, FUSED_OPSET)
"""Opsets of ai.onnx that bodies are written for."""
FUSED_DOMAIN = "com.microsoft"
"""Domain of ONNX Runtime's own ops. Some bodies use them below ai.onnx opset FUSED_OPSET."""


def function_body(
    node: onnx.NodeProto,
    dtype: int,
    opset: int = 23,
    *,
    dims: Mapping[str, int],
    narrow_dtype: int = 0,
    onnxruntime: bool = False,
) -> onnx.FunctionProto:
    """The function of one still:: node.

    Args:
        node: Inputs and outputs in the order of its OpSpec, "" for an absent optional one.
        dtype: Element type of the activations (TensorProto.FLOAT, FLOAT16 or BFLOAT16).
        opset: Opset of ai.onnx in the body.
        narrow_dtype: Element type of `narrow` inputs and states; 0: the activations' type.
        dims: Sizes of the OpSpec's symbols that are fixed in the model (heads, head dim, features), and WH, heads of the weights.
        onnxruntime: The body may use ONNX Runtime's own ops, where it has kernels for them.

    Returns:
        A function with the node's domain, name and `overload`.

    Raises:
        UnsupportedError: No body for the op, type or opset.
    """
    if node.op_type not in OPS:
        raise unknown(node.op_type, sorted(OPS), f"{node.domain}::{node.op_type}", UnsupportedError)
    if dtype not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
        name = onnx.TensorProto.DataType.Name(dtype)
        raise UnsupportedError(f"activations of type {name}: function bodies take FLOAT, FLOAT16 and BFLOAT16.")
    if opset not in OPSETS:
        raise UnsupportedError(f"opset {opset}: function bodies are written for opsets {OPSETS[0]} to {OPSETS[-1]}.")
    body: Body = import_module(f"{OPS[node.op_type].package}.body").BODY
    missing = [symbol for symbol in body.symbols if symbol not in dims]
    if missing:
        raise UnsupportedError(
            f"{node.name or node.op_type}: dimension {', '.join(missing)} is not fixed in the graph; declare the shapes of "
            "weights and past state."
        )
    function = None
    if onnxruntime and body.runtime:
        function = body.runtime(node, dtype, dims, {"": opset, FUSED_DOMAIN: 1}, FUSED_DOMAIN)
    if function is None and body.fused and (onnxruntime or opset >= FUSED_OPSET):
        domain = "" if opset >= FUSED_OPSET else FUSED_DOMAIN
        imports = {"": opset, **({domain: 1} if domain else {})}
        function = body.fused(node, dtype, dims, imports, domain)
    if function is None:
        function = body.write(without_scales(node), dtype, opset, dims)
    if has_codes(node):
        keep_codes(function, node, dtype, dims["D"])
    elif narrow_dtype not in (0, dtype):
        _keep(function, node, dtype, narrow_dtype)
    return function


def _keep(function: onnx.FunctionProto, node: onnx.NodeProto, dtype: int, narrow_dtype: int) -> None:
    """Add casts around the body, so that `narrow` inputs and states have type `narrow_dtype`."""
    spec = OPS[node.op_type]
    names = [state.name for state in spec.states if state.narrow]
    weights = {
        tensor.name for tensor, input_name in zip(spec.inputs, node.input, strict=False) if tensor.narrow and input_name
    }
    used = (weights | {f"past_{name}" for name in names}) & set(function.input)
    made = {f"present_{name}" for name in names} & set(function.output)
    rename(function.node, {name: f"{name}_wide" for name in used | made})
    before = [helper.make_node("Cast", [name], [f"{name}_wide"], to=dtype) for name in sorted(used)]
    after = [helper.make_node("Cast", [f"{name}_wide"], [name], to=narrow_dtype) for name in sorted(made)]
    nodes = [*before, *function.node, *after]
    del function.node[:]
    function.node.extend(nodes)
