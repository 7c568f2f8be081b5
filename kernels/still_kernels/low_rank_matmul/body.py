"""Function body of still::LowRankMatMul: two products and a sum, in the activations' type."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.functions.builder import Body, Scope
from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b = Scope()
    low = b("MatMul", "input", "inner")
    if any(node.input[3:]):
        b("Add", "base", b("MatMul", low, "outer"), out="output")
    else:
        b("MatMul", low, "outer", out="output")
    return b.function(LOW_RANK_MATMUL, node, {"": opset}, "input")


BODY = Body(function_body)
