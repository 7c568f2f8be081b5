"""Add the most likely token of every row by one node, still::GreedyToken.

ONNX Runtime's CUDA provider has no ArgMax of this opset and would copy all logits to the host.

requires: an output `logits`, [batch, tokens, vocabulary].
ensures: an output `next_token`, [batch, tokens], int32.
"""

from __future__ import annotations

from still_graphs.conditions import no_functions
from still_graphs.edits import Writer
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.passes.add_greedy_token import add_token, gives_next_token
from still_graphs.pipelines import CUDA, Pass
from still_graphs.states import NEXT_TOKEN
from still_kernels.greedy_token.spec import GREEDY_TOKEN


def add_greedy_node(model: ir.Model) -> int:
    """Like `add_greedy_token`, by one node."""
    return add_token(model, _node)


def _node(writer: Writer, graph: ir.Graph, logits: ir.Value) -> ir.Value:
    graph.opset_imports[DOMAIN] = GREEDY_TOKEN.version
    return writer.node(GREEDY_TOKEN.name, [logits], NEXT_TOKEN, domain=DOMAIN)


PASSES = {
    CUDA: (
        Pass(add_greedy_node, "greedy decoding stays on the device", requires=no_functions, ensures=gives_next_token),
    )
}
