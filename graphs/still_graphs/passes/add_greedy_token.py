"""Add the output `next_token`: the most likely token of every row, so that a decode loop can stay on the device; -1 where a logit is NaN or
the largest is infinite.

requires: an output `logits`, [batch, tokens, vocabulary].
ensures: an output `next_token`, [batch, tokens], int32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from still_graphs.edits import Writer, sizes, typed
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir
from still_graphs.states import NEXT_TOKEN


def add_greedy_token(model: ir.Model) -> int:
    """Append the output, in place; nothing when it is there.

    Raises:
        UnsupportedError: No output is called logits.
    """
    return add_token(model, _best)


def gives_next_token(model: ir.Model) -> str:
    return "" if NEXT_TOKEN in [v.name for v in model.graph.outputs] else f"no output {NEXT_TOKEN}"


def add_token(model: ir.Model, make: Callable[[Writer, ir.Graph, ir.Value], ir.Value]) -> int:
    """Add the output by the nodes that `make` writes for the logits."""
    outputs = {str(value.name): value for value in model.graph.outputs}
    if NEXT_TOKEN in outputs:
        return 0
    if "logits" not in outputs:
        raise UnsupportedError(f"no output is called logits, but {', '.join(outputs)}; greedy tokens need them.")
    logits = outputs["logits"]
    token = make(Writer(model.graph), model.graph, logits)
    model.graph.outputs.append(typed(token, sizes(logits)[:-1], ir.DataType.INT32))
    return 1


def _best(writer: Writer, graph: ir.Graph, logits: ir.Value) -> ir.Value:
    wide = writer.node("Cast", [logits], hint=f"{NEXT_TOKEN}.logits", to=ir.DataType.FLOAT)
    infinite = writer.constant(np.inf, "float32", f"{NEXT_TOKEN}.infinite")
    number = writer.node("Less", [wide, infinite], hint=f"{NEXT_TOKEN}.number")  # NaN is none
    rank = writer.node("Where", [number, wide, infinite], hint=f"{NEXT_TOKEN}.rank")
    best = writer.node("ArgMax", [rank], hint=f"{NEXT_TOKEN}.int64", axis=-1, keepdims=1)
    largest = writer.node("GatherElements", [rank, best], hint=f"{NEXT_TOKEN}.largest", axis=-1)
    finite = writer.node("Less", [writer.node("Abs", [largest]), infinite], hint=f"{NEXT_TOKEN}.finite")
    none = writer.constant([-1], "int64", f"{NEXT_TOKEN}.none")
    token = writer.node("Where", [finite, best, none], hint=f"{NEXT_TOKEN}.or_none")
    token = writer.node("Squeeze", [token, writer.constant([-1], "int64")], hint=f"{NEXT_TOKEN}.rows")
    return writer.node("Cast", [token], NEXT_TOKEN, to=ir.DataType.INT32)
