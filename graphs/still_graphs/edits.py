"""Edits of an onnx_ir graph that rewritings share: add nodes, replace values, store tensors."""

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
    """Add a node before `before`, named after it and `part`, and return its result."""
    name = f"{before.name}.{part}"
    node = ir.node(op, inputs, attributes or {}, domain=domain, name=name)
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]


def typed(value: ir.Value, shape: Sequence[int | str | ir.SymbolicDim | None], dtype: ir.DataType) -> ir.Value:
    """Set the shape and type of `value` and return it. Tools cannot infer them for unknown ops."""
    value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
    return value


def put_in_place(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new`, under the name of `old`."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def store(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer for `tensor`, under the tensor's name."""
    name = str(tensor.name)
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.initializers[name] = value
    return value


def forget(tensor: ir.TensorProtocol) -> None:
    """Unmap the file of a stored tensor, so that pages already read do not count as memory of this process."""
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()


def is_weight(value: ir.Value | None) -> bool:
    """Whether a value is stored with the graph."""
    return value is not None and value.is_initializer()


def width(value: ir.Value) -> int:
    """Size of the last dimension; 0 if unknown."""
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
    """Whether the node's axis is the last axis of its input. `default`: the axis of a node without the attribute."""
    axis, read = node.attributes.get_int("axis", default), node.inputs[0]
    return axis == -1 or (read is not None and axis == rank(read) - 1)


def drop_unused(graph: ir.Graph) -> int:
    """Remove the nodes of `graph` that no output depends on, and return their number."""
    before = len(graph)
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    return before - len(graph)


def drop_idle_weights(graph: ir.Graph) -> None:
    """Remove the initializers of `graph` that no node reads: fused passes leave constants behind."""
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            del graph.initializers[name]


def sizes(value: ir.Value) -> list[int | str | None]:
    """Dimensions of a value: numbers, names of free ones, None for unknown ones; [] if the shape is unknown."""
    return [size if isinstance(size, int) else size.value for size in value.shape or ()]


def fresh_names(graph: ir.Graph) -> Callable[[str], str]:
    """Returns a function name -> unused name in `graph` and its subgraphs: the name itself, or with a number appended."""
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
    """Dimensions of a value, 0 for those that are not numbers."""
    return [size if isinstance(size, int) else 0 for size in sizes(value)]


def graphs_of(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and every subgraph, outer ones first."""
    yield model.graph
    yield from model.graph.subgraphs()


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Value of an attribute; `default` if the node lacks it."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def is_standard(node: ir.Node, *ops: str) -> bool:
    """Whether `node` is one of these standard ONNX operators."""
    return node.domain == "" and node.op_type in ops


def constant_value(value: ir.Value | None) -> np.ndarray | None:
    """Value of a small constant (initializer or Constant node); None if it is computed or stored in a file."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)) else tensor.numpy()


class Writer:
    """Adds nodes to one graph. New names are unique in the whole model.

    Args:
        place: New nodes go before this node; None: at the end of the graph.
        fresh: Makes unique names, shared by writers of several graphs of a model; None: unique in `graph` and its subgraphs.
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
        """Add a node with one output, named `output` or freshly, and return the output."""
        first = inputs[0].name if inputs and inputs[0] is not None else ""
        name = output or self.fresh(hint or f"{first}.{op.lower()}")
        return self.add(ir.node(op, inputs, attributes, domain=domain, name=f"{name}/{op}"), [name])[0]

    def add(self, node: ir.Node, names: Sequence[str | None]) -> Sequence[ir.Value]:
        """Add a node that belongs to no graph yet, name its results, and return them."""
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
        """Replace `old`, which has one result, by a new node, and return the new result."""
        result = self.node(op, inputs, old.outputs[0].name, **attributes)
        put_in_place(old.outputs[0], result)
        self.graph.remove(old, safe=True)
        return result
