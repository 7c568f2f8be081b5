"""Function body of still::DenseMatMul: a product in float32."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.functions.builder import Body, Scope
from still_graphs.ops.dense_matmul import DENSE_MATMUL


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`; arguments as of `still_graphs.functions.function_body`."""
    b = Scope()
    given = {name for name, value in zip(DENSE_MATMUL.input_names(), node.input, strict=False) if value}
    rows = b.cast("input", TensorProto.FLOAT)
    if "norm_weight" in given:
        rows = normed(b, rows, node, dtype)
    right = "weight" if "weight" in given else b("Transpose", "turned_weight", perm=[1, 0])
    product = b("MatMul", rows, b.cast(right, TensorProto.FLOAT))
    if "residual" in given:
        product = b("Add", product, b.cast("residual", TensorProto.FLOAT))
    b.cast(product, dtype, out="output")
    return b.function(DENSE_MATMUL, node, {"": opset}, "input")


def normed(b: Scope, rows: str, node: onnx.NodeProto, dtype: int) -> str:
    """Rows in float32 over their root mean square, times norm_weight, rounded as activations are."""
    epsilon = next((a.f for a in node.attribute if a.name == "norm_epsilon"), 1e-5)
    mean = b("ReduceMean", b("Mul", rows, rows), b.constant([-1]))
    scaled = b("Div", rows, b("Sqrt", b("Add", mean, b.constant(epsilon, "float32"))))
    result = b("Mul", scaled, b.cast("norm_weight", TensorProto.FLOAT))
    return b.cast(b.cast(result, dtype), TensorProto.FLOAT)


BODY = Body(function_body)
