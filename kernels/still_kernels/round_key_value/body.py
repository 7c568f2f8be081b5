"""Function body of still::RoundKeyValue."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.codes import codes_of
from still_kernels.round_key_value.spec import ROUND_KEY_VALUE


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b = Scope()
    for source, made in zip(ROUND_KEY_VALUE.input_names(), ROUND_KEY_VALUE.output_names(), strict=True):
        codes, scales = codes_of(b, b.cast(source, FLOAT))
        b.cast(b("Mul", codes, scales), dtype, out=made)
    return b.function(ROUND_KEY_VALUE, node, {"": opset}, "key")


BODY = Body(function_body)
