"""Which initializers of a graph its outputs depend on, from nodes alone: names prove nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


def unread_initializers(model: onnx.ModelProto) -> list[str]:
    """Initializers that no output depends on, in order.

    A function's input counts as read if one of the function's outputs depends on it. Subgraphs of If, Loop and Scan read what their nodes
    name.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    inputs: dict[tuple[str, str, str], set[int]] = {}

    def read_inputs(key: tuple[str, str, str]) -> set[int]:
        if key not in inputs:
            function = functions[key]
            inputs[key] = set(range(len(function.input)))  # if it calls itself, which onnx forbids
            needed = _needed(function.node, function.output, read)
            inputs[key] = {number for number, name in enumerate(function.input) if name in needed}
        return inputs[key]

    def read(node: onnx.NodeProto) -> Iterator[str]:
        key = (node.domain, node.op_type, node.overload)
        wanted = read_inputs(key) if key in functions else None
        yield from (name for n, name in enumerate(node.input) if name and (wanted is None or n in wanted))
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                for inner in graph.node:
                    yield from read(inner)
                yield from (output.name for output in graph.output)

    needed = _needed(model.graph.node, [output.name for output in model.graph.output], read)
    return [tensor.name for tensor in model.graph.initializer if tensor.name not in needed]


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], read: Any) -> set[str]:
    """Names of values that `outputs` depend on, with themselves."""
    makers = {name: node for node in nodes for name in node.output if name}
    needed, pending = set[str](), list(outputs)
    while pending:
        if (name := pending.pop()) in needed:
            continue
        needed.add(name)
        if name in makers:
            pending += read(makers[name])
    return needed
