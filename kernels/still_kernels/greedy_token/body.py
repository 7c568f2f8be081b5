"""Function body of still::GreedyToken: the first of the largest numbers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.functions.builder import Body, Scope
from still_kernels.greedy_token.spec import GREEDY_TOKEN


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`; arguments as of `still_graphs.functions.function_body`. Not every runtime compares half precision."""
    b = Scope()
    b.cast(b("ArgMax", b.cast("logits", TensorProto.FLOAT), axis=-1, keepdims=0), TensorProto.INT32, out="token")
    return b.function(GREEDY_TOKEN, node, {"": opset}, "logits")


BODY = Body(function_body)
