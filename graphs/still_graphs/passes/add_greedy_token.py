"""Add the output `next_token`: the most likely token of every row, so that a decode loop can stay on the device.

requires: an output `logits`, [batch, tokens, vocabulary].
ensures: an output `next_token`, [batch, tokens], int32.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.greedy_token import GREEDY_TOKEN
from still_graphs.passes.walk import Rewriter, set_opset, value_names
from still_graphs.states import NEXT_TOKEN


@on_proto
def add_greedy_token(model: onnx.ModelProto) -> int:
    """Append the output, in place; nothing when it is there.

    Returns:
        Number of outputs added.

    Raises:
        UnsupportedError: No output is called logits.
    """
    rewriter = _rewriter(model)
    if rewriter is None:
        return 0
    best = rewriter.node("ArgMax", ["logits"], hint=f"{NEXT_TOKEN}.int64", axis=-1, keepdims=0)
    rewriter.node("Cast", [best], NEXT_TOKEN, to=TensorProto.INT32)
    _finish(rewriter)
    return 1


@on_proto
def add_greedy_node(model: onnx.ModelProto) -> int:
    """The same by a node of ours: ONNX Runtime's CUDA provider has no ArgMax of this opset, and all logits would go to the host for it.

    Returns, Raises: As of `add_greedy_token`.
    """
    rewriter = _rewriter(model)
    if rewriter is None:
        return 0
    rewriter.node(GREEDY_TOKEN.name, ["logits"], NEXT_TOKEN, domain=DOMAIN)
    _finish(rewriter)
    set_opset(model, DOMAIN, GREEDY_TOKEN.version)
    return 1


def _rewriter(model: onnx.ModelProto) -> Rewriter | None:
    """With the nodes of the graph; None: it has the output."""
    graph = model.graph
    outputs = [info.name for info in graph.output]
    if NEXT_TOKEN in outputs:
        return None
    if "logits" not in outputs:
        raise UnsupportedError(f"no output is called logits, but {', '.join(outputs)}; greedy tokens need them.")
    rewriter = Rewriter(graph, value_names(graph))
    rewriter.nodes = list(graph.node)
    return rewriter


def _finish(rewriter: Rewriter) -> None:
    rewriter.finish()
    logits = next(info for info in rewriter.graph.output if info.name == "logits")
    shape = [d.dim_param or d.dim_value for d in logits.type.tensor_type.shape.dim][:-1]
    rewriter.graph.output.append(helper.make_tensor_value_info(NEXT_TOKEN, TensorProto.INT32, shape))
