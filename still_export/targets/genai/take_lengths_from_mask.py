"""Compute lengths from an attention mask, which genai provides.

A row's mask has as many ones as the row has tokens after the call. genai pads on the right and in the first call alone, so of the tokens
of a call those are new that the mask counts, all of them where it counts more: the others came before.

requires: inputs `input_ids` [batch, tokens], `new_tokens` and `past_length` [batch].
ensures: an input `attention_mask` [batch, total_tokens] in their place; no output `present_length`.
"""

from __future__ import annotations

from still_graphs.edits import Writer, put_in_place, typed
from still_graphs.later_ir import ir

MASK = "attention_mask"
COUNTS = ("new_tokens", "past_length")
LENGTH = "present_length"


def take_lengths_from_mask(model: ir.Model) -> int:
    """Replace the inputs, in place."""
    graph, r = model.graph, Writer(model.graph)
    inputs = {str(value.name): value for value in graph.inputs}
    mask = typed(ir.Value(name=MASK), ["batch", "total_tokens"], ir.DataType.INT64)
    r.place = graph[0]
    total = r.node("ReduceSum", [mask, r.constant([1], "int64")], hint=f"{MASK}.total", keepdims=0)
    shape = r.node("Shape", [inputs["input_ids"]], hint="tokens", start=1, end=2)
    new = r.node("Min", [total, shape], COUNTS[0])
    counts = new, r.node("Sub", [total, new], COUNTS[1])
    for name, count in zip(COUNTS, counts, strict=True):
        put_in_place(inputs[name], count)
        graph.inputs.remove(inputs[name])
    gone = [value for value in graph.outputs if value.name == LENGTH]
    for value in gone:
        graph.outputs.remove(value)
        maker = value.producer()
        assert maker is not None
        graph.remove(maker, safe=True)
    graph.inputs.insert(1, mask)
    return len(COUNTS) + len(gone)


def lengths_from_mask(model: ir.Model) -> str:
    """The host provides no lengths."""
    left = [str(v.name) for v in (*model.graph.inputs, *model.graph.outputs) if v.name in (*COUNTS, LENGTH)]
    return f"inputs or outputs that genai has not, {', '.join(left)}" if left else ""
