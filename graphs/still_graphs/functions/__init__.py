"""Function bodies of the ops in standard ONNX ops.

A body is written for one combination of attributes, present optional inputs and element type; `function_body` finds the writer by
the op's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions import (
    add_rms_norm,
    attention,
    causal_conv,
    dense_matmul,
    gated_mlp,
    greedy_token,
    hybrid_attention,
    linear_attention,
    low_rank_matmul,
    matmul_nbits,
    rotary_qkv,
    round_key_value,
    swi_glu,
)
from still_graphs.functions.causal_conv import fused as fused_causal_conv
from still_graphs.functions.codes import has_codes, keep_codes, rename, without_scales
from still_graphs.functions.linear_attention import fused as fused_linear_attention
from still_graphs.ops import FUSED_OPSET, OPS

OPSETS = (23, 24, FUSED_OPSET)
"""Opsets of ai.onnx that bodies are written for."""
FUSED_DOMAIN = "com.microsoft"
"""Where ONNX Runtime has the ops that some bodies can stand around, before ai.onnx's opset FUSED_OPSET."""

Writer = Callable[[onnx.NodeProto, int, int, Mapping[str, int]], onnx.FunctionProto]
BODIES: dict[str, tuple[Writer, tuple[str, ...]]] = {
    "HybridAttention": (hybrid_attention.function_body, hybrid_attention.SYMBOLS),
    "Attention": (attention.function_body, attention.SYMBOLS),
    "LinearAttention": (linear_attention.function_body, linear_attention.SYMBOLS),
    "CausalConv": (causal_conv.function_body, causal_conv.SYMBOLS),
    "MatMulNBits": (matmul_nbits.function_body, matmul_nbits.SYMBOLS),
    "DenseMatMul": (dense_matmul.function_body, dense_matmul.SYMBOLS),
    "GatedMlp": (gated_mlp.function_body, gated_mlp.SYMBOLS),
    "RotaryQkv": (rotary_qkv.function_body, rotary_qkv.SYMBOLS),
    "AddRmsNorm": (add_rms_norm.function_body, add_rms_norm.SYMBOLS),
    "SwiGlu": (swi_glu.function_body, swi_glu.SYMBOLS),
    "RoundKeyValue": (round_key_value.function_body, round_key_value.SYMBOLS),
    "LowRankMatMul": (low_rank_matmul.function_body, low_rank_matmul.SYMBOLS),
    "GreedyToken": (greedy_token.function_body, greedy_token.SYMBOLS),
}
"""Per op, the writer of its body and the symbols of `dims` that it needs."""

FUSED_BODIES: dict[str, Callable[..., onnx.FunctionProto]] = {
    "LinearAttention": fused_linear_attention.fused_body,
    "CausalConv": fused_causal_conv.fused_body,
}
"""Per op that others have too, the writer of a body around theirs."""
RUNTIME_BODIES: dict[str, Callable[..., onnx.FunctionProto]] = {
    "MatMulNBits": matmul_nbits.runtime_body,
    "RotaryQkv": rotary_qkv.runtime_body,
}
"""Per op that ONNX Runtime alone has too, or kernels of its own for parts of it, the same."""


def function_body(
    node: onnx.NodeProto,
    dtype: int,
    opset: int = 23,
    *,
    dims: Mapping[str, int],
    kept: int = 0,
    onnxruntime: bool = False,
) -> onnx.FunctionProto:
    """The function of one still:: node.

    Args:
        node: Inputs and outputs in the order of its OpSpec, "" for an absent optional one.
        dtype: Element type of the activations (TensorProto.FLOAT, FLOAT16 or BFLOAT16).
        opset: Of ai.onnx in the body.
        kept: Element type of the states that may be narrower; 0: that of the activations.
        dims: Sizes of the OpSpec's symbols that are fixed in the model (heads, head dim, features), and WH, heads of the weights.
        onnxruntime: ONNX Runtime's own ops may stand in the body, where it has kernels for them.

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
    if onnxruntime and node.op_type in RUNTIME_BODIES:
        imports = {"": opset, FUSED_DOMAIN: 1}
        function = RUNTIME_BODIES[node.op_type](node, dims, imports, FUSED_DOMAIN)
    elif node.op_type in FUSED_BODIES and (onnxruntime or opset >= FUSED_OPSET):
        domain = "" if opset >= FUSED_OPSET else FUSED_DOMAIN
        imports = {"": opset, **({domain: 1} if domain else {})}
        function = FUSED_BODIES[node.op_type](node, dtype, dims, imports, domain)
    else:
        function = write(without_scales(node), dtype, opset, dims)
    if has_codes(node):
        keep_codes(function, node, dtype, dims["D"])
    elif kept not in (0, dtype):
        _keep(function, node, dtype, kept)
    return function


def _keep(function: onnx.FunctionProto, node: onnx.NodeProto, dtype: int, kept: int) -> None:
    """Let the states that may be narrower come in and go out as `kept`: cast whole around the body, which is for every runtime and is
    not fast; kernels read the type itself."""
    spec = OPS[node.op_type]
    names = [state.name for state in spec.states if state.narrow]
    given = {f"past_{name}" for name in names} & set(function.input)
    made = {f"present_{name}" for name in names} & set(function.output)
    rename(function.node, {name: f"{name}_wide" for name in given | made})
    before = [helper.make_node("Cast", [name], [f"{name}_wide"], to=dtype) for name in sorted(given)]
    after = [helper.make_node("Cast", [f"{name}_wide"], [name], to=kept) for name in sorted(made)]
    nodes = [*before, *function.node, *after]
    del function.node[:]
    function.node.extend(nodes)
