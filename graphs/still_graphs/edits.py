"""Edits of an onnx_ir graph that every rewriting needs: a node before another, a value in another's place, a stored tensor."""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.later_ir import ir

CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's own ops."""


def add_node(
    graph: ir.Graph,
    before: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    part: str,
    attributes: dict[str, int] | None = None,
    domain: str = "",
) -> ir.Value:
    """The result of a new node, which is named after the node `before` which it stands, and `part`."""
    name = f"{before.name}.{part}"
    node = ir.node(op, inputs, attributes or {}, domain=domain, name=name)
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]


def typed(value: ir.Value, shape: Sequence[int | str | ir.SymbolicDim | None], dtype: ir.DataType) -> ir.Value:
    """`value`, which now says its shape and type: those of ops that tools do not know cannot be inferred."""
    value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
    return value


def put_in_place(old: ir.Value, new: ir.Value) -> None:
    """Let `new` stand where `old` did, under its name."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def store(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer of the tensor's name."""
    name = str(tensor.name)
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.initializers[name] = value
    return value


def forget(tensor: ir.TensorProtocol) -> None:
    """Unmap the file of a stored tensor: pages that were read would count as this process's memory."""
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
