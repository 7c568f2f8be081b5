"""Function body of still::AddRmsNorm: a sum and a norm in float32."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.functions.builder import Body, Scope
from still_kernels.add_rms_norm.spec import ADD_RMS_NORM
from still_kernels.dense_matmul.body import normed


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b, wide = Scope(), TensorProto.FLOAT
    x = b.cast("input", wide)
    total = b.cast(b("Add", x, b.cast("residual", wide)) if node.input[1] else x, dtype, out="sum")
    b.cast(normed(b, b.cast(total, wide), node, dtype), dtype, out="output")
    return b.function(ADD_RMS_NORM, node, {"": opset}, "input")


BODY = Body(function_body)
