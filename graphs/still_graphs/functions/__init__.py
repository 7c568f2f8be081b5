"""Function bodies of the ops in standard ONNX ops.

A body is written for one combination of attributes, present optional inputs and element type; `function_body` finds the writer by
the op's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions import attention, causal_conv, hybrid_attention, linear_attention

OPSETS = (23, 24)
"""Opsets of ai.onnx that bodies are written for."""

Writer = Callable[[onnx.NodeProto, int, int, Mapping[str, int]], onnx.FunctionProto]
BODIES: dict[str, tuple[Writer, tuple[str, ...]]] = {
    "HybridAttention": (hybrid_attention.function_body, hybrid_attention.SYMBOLS),
    "Attention": (attention.function_body, attention.SYMBOLS),
    "LinearAttention": (linear_attention.function_body, linear_attention.SYMBOLS),
    "CausalConv": (causal_conv.function_body, causal_conv.SYMBOLS),
}
"""Per op, the writer of its body and the symbols of `dims` that it needs."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int = 23, *, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of one still:: node.

    Args:
        node: Inputs and outputs in the order of its OpSpec, "" for an absent optional one.
        dtype: Element type of the activations (TensorProto.FLOAT, FLOAT16 or BFLOAT16).
        opset: Of ai.onnx in the body.
        dims: Sizes of the OpSpec's symbols that are fixed in the model (heads, head dim, features), and WH, heads of the weights.

    Returns:
        A function with the node's domain, name and `overload`.

    Raises:
        UnsupportedError: No body for the op, type or opset.
    """
    if node.op_type not in BODIES:
        raise UnsupportedError(
            f"{node.domain}::{node.op_type} has no function body; known: {', '.join(sorted(BODIES))}."
        )
    if dtype not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
        name = onnx.TensorProto.DataType.Name(dtype)
        raise UnsupportedError(f"activations of type {name}: function bodies take FLOAT, FLOAT16 and BFLOAT16.")
    if opset not in OPSETS:
        raise UnsupportedError(f"opset {opset}: function bodies are written for opsets {OPSETS[0]} to {OPSETS[-1]}.")
    write, symbols = BODIES[node.op_type]
    missing = [symbol for symbol in symbols if symbol not in dims]
    if missing:
        raise UnsupportedError(
            f"{node.name or node.op_type}: dimension {', '.join(missing)} is not fixed in the graph; declare the shapes of "
            "weights and past state."
        )
    return write(node, dtype, opset, dims)
