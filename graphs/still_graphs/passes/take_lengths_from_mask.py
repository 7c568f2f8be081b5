"""Compute the lengths from an attention mask, which is what onnxruntime-genai gives.

A row's mask has as many ones as the row has tokens after the call. genai pads on the right and in the first call alone, so of the tokens
of a call those are new that the mask counts, all of them where it counts more: the others came before.

requires: inputs `input_ids` [batch, tokens], `new_tokens` and `past_length` [batch].
ensures: an input `attention_mask` [batch, total_tokens] in their place; no output `present_length`.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import Rewriter, value_names

MASK = "attention_mask"
COUNTS = ("new_tokens", "past_length")
LENGTH = "present_length"


@on_proto
def take_lengths_from_mask(model: onnx.ModelProto) -> int:
    """Replace the inputs, in place.

    Returns:
        Number of inputs and outputs that are gone.
    """
    graph = model.graph
    r = Rewriter(graph, value_names(graph))
    total = r.node("ReduceSum", [MASK, r.constant([1], "int64")], hint=f"{MASK}.total", keepdims=0)
    shape = r.node("Shape", ["input_ids"], hint="tokens", start=1, end=2)
    r.node("Min", [total, shape], "new_tokens")
    r.node("Sub", [total, "new_tokens"], "past_length")
    r.nodes += [node for node in graph.node if LENGTH not in node.output]
    r.finish()
    before = len(graph.input) + len(graph.output) + 1
    for infos, gone in ((graph.input, COUNTS), (graph.output, (LENGTH,))):
        kept = [info for info in infos if info.name not in gone]
        del infos[:]
        infos.extend(kept)
    graph.input.insert(1, helper.make_tensor_value_info(MASK, TensorProto.INT64, ["batch", "total_tokens"]))
    return before - len(graph.input) - len(graph.output)
