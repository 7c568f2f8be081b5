"""Function body of still::SwiGlu: the gate in float32."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from still_graphs.functions.builder import Body, Scope
from still_kernels.swi_glu.spec import SWI_GLU


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b, width = Scope(), int(helper.get_node_attr_value(node, SWI_GLU.attributes[0].name))
    gate, up = b.multi("Split", b.cast("input", TensorProto.FLOAT), [width, width], out=2, axis=-1)
    b.cast(b("Mul", b("Mul", gate, b("Sigmoid", gate)), up), dtype, out="output")
    return b.function(SWI_GLU, node, {"": opset}, "input")


BODY = Body(function_body)
