"""Function body of still::Decay."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx
from onnx import helper

from still_graphs.functions.builder import FLOAT, Body, Scope
from tests.toy.spec import DECAY


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """Powers of the decay as a matrix: output = L v + decay^(t + 1) s."""
    b = Scope()
    rate = math.log({a.name: a.f for a in node.attribute}.get("decay", 0.5))
    width = dims["H"] * dims["D"]

    def powers(exponent: str) -> str:
        return b("Exp", b("Mul", b.cast(exponent, FLOAT), rate))

    value = b.cast(b.reshape("value", 0, 0, width), FLOAT)  # [B, T, H * D]
    past = b.reshape("past_total", 0, 1, width)
    step = b.arange(b.dim("value", 1))  # T
    age = b("Sub", b.unsqueeze(step, 1), step)  # [T, T]
    weight = b("Where", b("GreaterOrEqual", age, 0), powers(b("Max", age, 0)), 0.0)
    start = b("Mul", b.unsqueeze(powers(b("Add", step, 1)), 1), past)
    mixed = b("Add", b("MatMul", weight, value), start)
    real = b("Less", step, b.unsqueeze("new_tokens", 1))  # [B, T]
    mixed = b("Where", b.unsqueeze(real, 2), mixed, 0.0)
    b.cast(b.reshape(mixed, 0, 0, dims["H"], dims["D"]), dtype, out="output")
    left = b("Sub", b.unsqueeze("new_tokens", 1), b("Add", step, 1))  # tokens behind each, [B, T]
    last = b("Where", b("GreaterOrEqual", left, 0), powers(b("Max", left, 0)), 0.0)
    added = b("MatMul", b.unsqueeze(last, 1), value)  # [B, 1, H * D]
    kept = b("Mul", b.unsqueeze(powers("new_tokens"), 1, 2), past)
    b.reshape(b("Add", kept, added), 0, dims["H"], dims["D"], out="present_total")
    b("Identity", "past_length", out=b.fresh("unused"))  # a function derives its inputs from their uses
    return helper.make_function(
        DECAY.domain,
        node.op_type,
        list(DECAY.input_names()),
        list(DECAY.output_names()),
        b.nodes,
        [helper.make_opsetid("", opset)],
        [],
    )


BODY = Body(function_body, ("H", "D"))
