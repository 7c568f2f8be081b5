"""Edits of an onnx_ir graph that every rewriting needs: a node before another, a value in another's place, a stored tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

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


def known_sizes(value: ir.Value) -> list[int]:
    """Dimensions of a value, 0 for those that are no numbers."""
    return [size if isinstance(size, int) else 0 for size in sizes(value)]


def graphs_of(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and every graph inside it, outer ones first."""
    yield model.graph
    yield from model.graph.subgraphs()


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Value of an attribute; `default` where the node has none."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def is_standard(node: ir.Node, *ops: str) -> bool:
    """Whether `node` is one of these operators of ONNX."""
    return node.domain == "" and node.op_type in ops


def constant_value(value: ir.Value | None) -> np.ndarray | None:
    """The value of a small constant (initializer or Constant node), None where it is computed or lies in a file."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)) else tensor.numpy()


class Writer:
    """Adds nodes to one graph, before the node `place` or, where that is None, at its end; fresh names are unique in the whole model.

    Args:
        fresh: Gives names, where several graphs of a model are written; None: of `graph` and the graphs inside it.
    """

    def __init__(self, graph: ir.Graph, fresh: Callable[[str], str] | None = None) -> None:
        self.graph, self.fresh = graph, fresh or fresh_names(graph)
        self.place: ir.Node | None = None

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        output: str | None = None,
        *,
        hint: str = "",
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """The result of a new node with one output, named `output` or freshly."""
        first = inputs[0].name if inputs and inputs[0] is not None else ""
        name = output or self.fresh(hint or f"{first}.{op.lower()}")
        return self.add(ir.node(op, inputs, attributes, domain=domain, name=f"{name}/{op}"), [name])[0]

    def add(self, node: ir.Node, names: Sequence[str | None]) -> Sequence[ir.Value]:
        """The results of a node that has no graph yet, which get names."""
        for value, name in zip(node.outputs, names, strict=True):
            value.name = name
        if self.place is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.place, node)
        return node.outputs

    def constant(self, value: Any, dtype: str | np.dtype[Any], hint: str = "constant") -> ir.Value:
        name = self.fresh(hint)
        tensor = ir.tensor(np.asarray(value, dtype=dtype), name=name)
        return self.node("Constant", [], name, value=tensor)

    def instead(self, old: ir.Node, op: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """The result of a new node in the place of `old`, which goes with its one result."""
        result = self.node(op, inputs, old.outputs[0].name, **attributes)
        put_in_place(old.outputs[0], result)
        self.graph.remove(old, safe=True)
        return result
