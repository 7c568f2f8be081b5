"""Shapes before numbers become float32: TensorRT 8.6 loses track of the type of a float32 reshape.

requires: nodes in order.
ensures: no Reshape and no Unsqueeze of the main graph reads what was a value of 16 bits, but for a cast and functions of each number.
"""

from __future__ import annotations

from still_graphs.edits import is_standard
from still_graphs.later_ir import ir

MOVES = ("Reshape", "Unsqueeze")
POINTWISE = ("Abs", "Exp", "Log", "Neg", "Reciprocal", "Sigmoid", "Softplus", "Sqrt", "Tanh")
"""Elementwise operators, which a reshape may precede."""


def shape_before_widening(model: ir.Model) -> int:
    """Move reshapes before the casts to float32 that they read, in place."""
    found = [(node, chain) for node in model.graph if (chain := _chain(node))]
    for node, chain in found:
        _move(model.graph, node, chain)
    return len(found)


def shaped_before_widening(model: ir.Model) -> str:
    """No reshape reads what was just made float32."""
    left = [str(node.name) for node in model.graph if _chain(node)]
    return f"reshapes of values that were made float32 just before, {', '.join(left[:3])}" if left else ""


def _chain(node: ir.Node) -> list[ir.Node]:
    """The nodes from a cast of 16 bits to what `node` reshapes, in order; empty for other values."""
    chain: list[ir.Node] = []
    value = node.inputs[0] if is_standard(node, *MOVES) else None
    while value is not None and (maker := value.producer()) is not None and len(value.uses()) == 1:
        if value.is_graph_output() or not is_standard(maker, "Cast", *POINTWISE):
            break
        chain.insert(0, maker)
        value = maker.inputs[0]
        if maker.op_type == "Cast":
            wide = maker.attributes["to"].as_int() == ir.DataType.FLOAT
            return (
                chain
                if wide and value is not None and value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
                else []
            )
    return []


def _move(graph: ir.Graph, node: ir.Node, chain: list[ir.Node]) -> None:
    """Reshape the first node's input instead, and let the last node give the result."""
    shaped, first, last = node.outputs[0], chain[0], chain[-1]
    narrow = first.inputs[0]
    assert narrow is not None and narrow.dtype is not None
    # Nodes between get the new shape; both ends swap names.
    last.outputs[0].name, shaped.name = shaped.name, last.outputs[0].name
    shaped.replace_all_uses_with(last.outputs[0], replace_graph_outputs=True)
    node.replace_input_with(0, narrow)
    first.replace_input_with(0, shaped)
    for inner in chain:
        inner.outputs[0].shape = shaped.shape
    shaped.dtype = narrow.dtype
    graph.remove(chain)
    graph.insert_after(node, chain)
