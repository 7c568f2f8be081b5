"""Function body of still::GreedyToken: the first of the largest numbers, -1 where there is none that is finite."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto

from still_graphs.functions.builder import Body, Scope
from still_kernels.greedy_token.spec import GREEDY_TOKEN


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`; arguments: see `still_graphs.functions.function_body`. Not every runtime compares half precision."""
    b = Scope()
    logits = b.cast("logits", TensorProto.FLOAT)
    infinite = b.constant(np.inf, "float32")
    rank = b("Where", b("Less", logits, infinite), logits, infinite)  # NaN too
    best = b("ArgMax", rank, axis=-1, keepdims=1)
    finite = b("Less", b("Abs", b("GatherElements", rank, best, axis=-1)), infinite)
    b.cast(b("Squeeze", b("Where", finite, best, -1), [-1]), TensorProto.INT32, out="token")
    return b.function(GREEDY_TOKEN, node, {"": opset}, "logits")


BODY = Body(function_body)
