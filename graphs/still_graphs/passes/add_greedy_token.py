"""Add the output `next_token`: the most likely token of every row, so that a decode loop can stay on the device.

requires: an output `logits`, [batch, tokens, vocabulary].
ensures: an output `next_token`, [batch, tokens], int32.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.passes.walk import Rewriter, value_names

NEXT_TOKEN = "next_token"


def add_greedy_token(model: onnx.ModelProto) -> int:
    """Append the output, in place; nothing when it is there.

    Returns:
        Number of outputs added.

    Raises:
        UnsupportedError: No output is called logits.
    """
    graph = model.graph
    outputs = {info.name: info for info in graph.output}
    if NEXT_TOKEN in outputs:
        return 0
    if "logits" not in outputs:
        raise UnsupportedError(f"no output is called logits, but {', '.join(outputs)}; greedy tokens need them.")
    rewriter = Rewriter(graph, value_names(graph))
    rewriter.nodes = list(graph.node)
    best = rewriter.node("ArgMax", ["logits"], hint=f"{NEXT_TOKEN}.int64", axis=-1, keepdims=0)
    rewriter.node("Cast", [best], NEXT_TOKEN, to=TensorProto.INT32)
    rewriter.finish()
    shape = [d.dim_param or d.dim_value for d in outputs["logits"].type.tensor_type.shape.dim][:-1]
    graph.output.append(helper.make_tensor_value_info(NEXT_TOKEN, TensorProto.INT32, shape))
    return 1
