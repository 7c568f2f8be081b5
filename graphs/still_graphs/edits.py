"""Edits of an onnx_ir graph that every rewriting needs: a node before another, a value in another's place, a stored tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def is_weight(value: ir.Value | None) -> bool:
    """Whether a value is stored with the graph."""
    return value is not None and value.is_initializer()


def width(value: ir.Value) -> int:
    """Numbers of a token, the last dimension; 0 where it is not known."""
    last = value.shape[-1] if value.shape else None
    return last if isinstance(last, int) else 0


def rank(value: ir.Value) -> int:
    """Dimensions of a value; 0 where they are not known."""
    return len(value.shape or ())


def in_half(*values: ir.Value) -> bool:
    """Whether all values are of one type, which has 16 bits."""
    kinds = {value.dtype for value in values}
    return len(kinds) == 1 and kinds <= {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def on_last(node: ir.Node, default: int = 0) -> bool:
    """Whether the axis of a node is the last one of what it reads; `default`: the axis where it names none."""
    axis, given = node.attributes.get_int("axis", default), node.inputs[0]
    return axis == -1 or (given is not None and axis == rank(given) - 1)


def drop_unused(graph: ir.Graph) -> int:
    """Remove the nodes of `graph` that no output depends on; how many there were."""
    before = len(graph)
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    return before - len(graph)


def sizes(value: ir.Value) -> list[int | str | None]:
    """Dimensions of a value: numbers, names of free ones, None for unknown ones; none where nothing is known."""
    return [size if isinstance(size, int) else size.value for size in value.shape or ()]


def fresh_names(graph: ir.Graph) -> Callable[[str], str]:
    """Gives names that no value of `graph` or the graphs inside it has: the one that is asked for, or with a number."""
    inner = {each for node in ir.traversal.RecursiveGraphIterator(graph) if (each := node.graph) is not None} | {graph}
    used = {str(value.name) for each in inner for value in (*each.inputs, *each.initializers.values())}
    used |= {str(value.name) for each in inner for node in each for value in node.outputs}

    def fresh(hint: str) -> str:
        name, number = hint, 0
        while name in used:
            number += 1
            name = f"{hint}_{number}"
        used.add(name)
        return name

    return fresh
