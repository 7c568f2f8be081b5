"""Function body of still::BetweenAttention: products in float32, rounded where a node would end."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from still_graphs.functions.builder import Body, Scope
from still_graphs.ops.between_attention import BETWEEN_ATTENTION

WIDE = TensorProto.FLOAT


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`; arguments as of `still_graphs.functions.function_body`."""
    b, middle = Scope(), dims["M"]
    epsilon = helper.get_node_attr_value(node, BETWEEN_ATTENTION.attributes[0].name)

    def rounded(x: str, out: str | None = None) -> str:
        return b.wide(b.cast(x, dtype, out=out), dtype) if dtype != WIDE or out else x

    def product(rows: str, weight: str) -> str:
        return b("MatMul", rows, b.wide(weight, dtype))

    def norm(rows: str, weight: str) -> str:
        mean = b("ReduceMean", b("Mul", rows, rows), b.constant([-1]))
        scaled = b("Div", rows, b("Sqrt", b("Add", mean, b.constant(float(epsilon), "float32"))))
        return rounded(b("Mul", scaled, b.wide(weight, dtype)))

    x = rounded(b("Add", b.wide("residual", dtype), product(b.wide("attention", dtype), "output_weight")))
    both = product(norm(x, "norm_weight"), "gate_up")
    gate, up = (b("Slice", both, [first], [first + middle], [2]) for first in (0, middle))
    inner = rounded(b("Mul", b("Mul", gate, b("Sigmoid", gate)), up))
    layer = rounded(b("Add", x, product(inner, "down")), "output")
    rows = norm(layer, "next_norm_weight")
    b.cast(product(rows, "next_weight"), dtype, out="next")
    if any(node.input[len(BETWEEN_ATTENTION.inputs) - 1 :]):
        b.cast(product(rows, "next_gate_weight"), dtype, out="next_gate")
    return b.function(BETWEEN_ATTENTION, node, {"": opset}, "attention")


BODY = Body(function_body, ("M",))
