"""Basic edits of an onnx_ir graph: insert a node before another, replace a value, store a tensor."""

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
    """The result of a new node inserted before `before` and named after it and `part`."""
    name = f"{before.name}.{part}"
    node = ir.node(op, inputs, attributes or {}, domain=domain, name=name)
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]


def typed(value: ir.Value, shape: Sequence[int | str | ir.SymbolicDim | None], dtype: ir.DataType) -> ir.Value:
    """`value` with its shape and type set, for ops whose results tools cannot infer."""
    value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
    return value


def put_in_place(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new`, which gets its name."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def store(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer with the tensor's name."""
    name = str(tensor.name)
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.initializers[name] = value
    return value


def forget(tensor: ir.TensorProtocol) -> None:
    """Unmap the file of a stored tensor, because pages that were read count as this process's memory."""
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()


def is_weight(value: ir.Value | None) -> bool:
    """Whether a value is stored with the graph."""
    return value is not None and value.is_initializer()


def width(value: ir.Value) -> int:
    """Last dimension of a value; 0 if unknown."""
    last = value.shape[-1] if value.shape else None
    return last if isinstance(last, int) else 0


def rank(value: ir.Value) -> int:
    """Number of dimensions; 0 if unknown."""
    return len(value.shape or ())


def in_half(*values: ir.Value) -> bool:
    """Whether all values have the same 16-bit type."""
    kinds = {value.dtype for value in values}
    return len(kinds) == 1 and kinds <= {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def on_last(node: ir.Node, default: int = 0) -> bool:
    """Whether a node's axis is the last of its input; `default`: the axis without the attribute."""
    axis, read = node.attributes.get_int("axis", default), node.inputs[0]
    return axis == -1 or (read is not None and axis == rank(read) - 1)


def drop_unused(graph: ir.Graph) -> int:
    """Remove the nodes of `graph` that no output depends on; returns their number."""
    before = len(graph)
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    return before - len(graph)


def sizes(value: ir.Value) -> list[int | str | None]:
    """Dimensions of a value: numbers, names of free ones, None for unknown ones; empty if nothing is known."""
    return [size if isinstance(size, int) else size.value for size in value.shape or ()]


def fresh_names(graph: ir.Graph) -> Callable[[str], str]:
    """A function that returns names unused in `graph` and its subgraphs: the requested one, or one with a number."""
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
    """Dimensions of a value; 0 for those that are not numbers."""
    return [size if isinstance(size, int) else 0 for size in sizes(value)]


def graphs_of(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and every subgraph, outer ones first."""
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
    """The value of a small constant (initializer or Constant node); None if it is computed or stored in a file."""
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
        """Add a node without a graph; its results get names."""
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
        """Replace `old` by a new node; returns its result."""
        result = self.node(op, inputs, old.outputs[0].name, **attributes)
        put_in_place(old.outputs[0], result)
        self.graph.remove(old, safe=True)
        return result
