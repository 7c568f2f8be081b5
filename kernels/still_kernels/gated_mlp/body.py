"""Function body of still::GatedMlp: products in float32."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.functions.builder import Body, Scope
from still_kernels.dense_matmul.body import normed
from still_kernels.gated_mlp.spec import GATED_MLP


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b = Scope()
    wide = TensorProto.FLOAT
    rows = b.cast("input", wide)
    both = b("MatMul", normed(b, rows, node, dtype), b.cast("gate_up", wide))
    gate = b("Slice", both, [0], [dims["M"]], [2])
    up = b("Slice", both, [dims["M"]], [2 * dims["M"]], [2])
    middle = b("Mul", b("Mul", gate, b("Sigmoid", gate)), up)
    middle = b.cast(b.cast(middle, dtype), wide)
    b.cast(b("Add", rows, b("MatMul", middle, b.cast("down", wide))), dtype, out="output")
    return b.function(GATED_MLP, node, {"": opset}, "input")


BODY = Body(function_body, ("M",))
