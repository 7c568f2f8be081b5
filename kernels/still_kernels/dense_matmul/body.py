"""Function body of still::DenseMatMul: a product in float32. For e4m3 codes tokens are first rounded to e4m3."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import Body, Scope
from still_kernels.dense_matmul.spec import DENSE_MATMUL, NUMBERS


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b = Scope()
    present = {name for name, value in zip(DENSE_MATMUL.input_names(), node.input, strict=False) if value}
    rows = b.cast("input", TensorProto.FLOAT)
    if "norm_weight" in present:
        rows = normed(b, rows, node, dtype)
    if "codes" in present:
        product = _of_codes(b, rows, node, dims)
    else:
        right = "weight" if "weight" in present else b("Transpose", "turned_weight", perm=[1, 0])
        product = b("MatMul", rows, b.cast(right, TensorProto.FLOAT))
    if "residual" in present:
        product = b("Add", product, b.cast("residual", TensorProto.FLOAT))
    b.cast(product, dtype, out="output")
    return b.function(DENSE_MATMUL, node, {"": opset}, "input")


def normed(b: Scope, rows: str, node: onnx.NodeProto, dtype: int) -> str:
    """Rows in float32 over their root mean square, times norm_weight, rounded to the activations' type."""
    epsilon = next((a.f for a in node.attribute if a.name == "norm_epsilon"), 1e-5)
    mean = b("ReduceMean", b("Mul", rows, rows), b.constant([-1]))
    scaled = b("Div", rows, b("Sqrt", b("Add", mean, b.constant(epsilon, "float32"))))
    result = b("Mul", scaled, b.cast("norm_weight", TensorProto.FLOAT))
    return b.cast(b.cast(result, dtype), TensorProto.FLOAT)


def _of_codes(b: Scope, rows: str, node: onnx.NodeProto, dims: Mapping[str, int]) -> str:
    """Rows, rounded to e4m3 with one scale each, times codes and their scales."""
    inputs, outputs, blocks = dims["I"], dims["O"], dims["IS"]
    if dims["IW"] * 4 != inputs or inputs % blocks:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {dims['IW']} words of codes and scales of {blocks} blocks for {inputs} inputs have no body."
        )
    scales = b("Div", b("ReduceMax", b("Abs", rows), [-1]), MOST)
    divided = b("Div", rows, b("Where", b("Greater", scales, 0.0), scales, 1.0))
    rounded = b.cast(b.cast(divided, TensorProto.FLOAT8E4M3FN), TensorProto.FLOAT)
    shifts = b.constant((0, 8, 16, 24), "uint32")
    spread = b("BitShift", b.unsqueeze(b.cast("codes", TensorProto.UINT32), 2), shifts, direction="RIGHT")
    places = b.cast(b("BitwiseAnd", spread, b.constant(255, "uint32")), TensorProto.INT32)
    numbers = b.reshape(b("Gather", b.constant(NUMBERS, "float32"), places), outputs, blocks, inputs // blocks)
    weight = b("Mul", numbers, b.unsqueeze(b("Transpose", "scales", perm=[1, 0]), 2))
    turned = b("Transpose", b.reshape(weight, outputs, inputs), perm=[1, 0])
    return b("Mul", b("MatMul", rounded, turned), scales)


MOST = 448.0
BODY = Body(function_body)
