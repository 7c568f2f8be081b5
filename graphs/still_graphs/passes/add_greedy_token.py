"""Add the output `next_token`: the most likely token of every row, so that a decode loop can stay on the device.

requires: an output `logits`, [batch, tokens, vocabulary].
ensures: an output `next_token`, [batch, tokens], int32.
"""

from __future__ import annotations

from still_graphs.edits import Writer, sizes, typed
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.ops.greedy_token import GREEDY_TOKEN
from still_graphs.states import NEXT_TOKEN


def add_greedy_token(model: ir.Model) -> int:
    """Append the output, in place; nothing when it is there.

    Returns:
        Number of outputs added.

    Raises:
        UnsupportedError: No output is called logits.
    """
    return _add(model)


def add_greedy_node(model: ir.Model) -> int:
    """The same by a node of ours: ONNX Runtime's CUDA provider has no ArgMax of this opset, and all logits would go to the host for it.

    Returns, Raises: As of `add_greedy_token`.
    """
    return _add(model, ours=True)


def gives_next_token(model: ir.Model) -> str:
    """The graph gives the most likely token."""
    return "" if NEXT_TOKEN in [v.name for v in model.graph.outputs] else f"no output {NEXT_TOKEN}"


def _add(model: ir.Model, ours: bool = False) -> int:
    outputs = {str(value.name): value for value in model.graph.outputs}
    if NEXT_TOKEN in outputs:
        return 0
    if "logits" not in outputs:
        raise UnsupportedError(f"no output is called logits, but {', '.join(outputs)}; greedy tokens need them.")
    logits, writer = outputs["logits"], Writer(model.graph)
    if ours:
        token = writer.node(GREEDY_TOKEN.name, [logits], NEXT_TOKEN, domain=DOMAIN)
        model.graph.opset_imports[DOMAIN] = GREEDY_TOKEN.version
    else:
        best = writer.node("ArgMax", [logits], hint=f"{NEXT_TOKEN}.int64", axis=-1, keepdims=0)
        token = writer.node("Cast", [best], NEXT_TOKEN, to=ir.DataType.INT32)
    model.graph.outputs.append(typed(token, sizes(logits)[:-1], ir.DataType.INT32))
    return 1
