"""Walking and editing graphs in protobuf, which tests build, check and run."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Graphs that are attributes of `node`."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def walk_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and every graph inside it, outer ones first."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from walk_graphs(inner)


def walk_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for inner in walk_graphs(graph):
        yield from inner.node


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Value of an attribute, strings as str; `default` where the node has none."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


def drop_attribute(node: onnx.NodeProto, name: str) -> bool:
    for index, item in enumerate(node.attribute):
        if item.name == name:
            del node.attribute[index]
            return True
    return False


def value_names(graph: onnx.GraphProto) -> set[str]:
    """Every value name in `graph` and the graphs inside it."""
    names: set[str] = set()
    for inner in walk_graphs(graph):
        names.update(i.name for i in inner.input)
        names.update(i.name for i in inner.initializer)
        names.update(name for node in inner.node for name in node.output)
    return names


def dimensions(graph: onnx.GraphProto) -> dict[str, list[int | str | None]]:
    """Dimensions by value name, as far as `graph` declares them: numbers, names of free ones, None for unknown ones."""
    return {
        info.name: [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in info.type.tensor_type.shape.dim
        ]
        for info in (*graph.value_info, *graph.input, *graph.output)
        if info.type.tensor_type.HasField("shape")
    }


def initializers(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    return {i.name: i for i in graph.initializer}


def set_opset(model: onnx.ModelProto, domain: str, version: int) -> None:
    """Import `domain` at `version`, whatever was imported."""
    for item in model.opset_import:
        if item.domain == domain:
            item.version = version
            return
    model.opset_import.append(helper.make_opsetid(domain, version))


def opset_version(model: onnx.ModelProto, domain: str = "") -> int:
    """Imported version of `domain`, 0 where it is not imported."""
    return next((o.version for o in model.opset_import if o.domain in (domain, "ai.onnx" if not domain else domain)), 0)


class Rewriter:
    """Collects the new node list of one graph; fresh names are unique in the whole model."""

    def __init__(self, graph: onnx.GraphProto, used: set[str]) -> None:
        self.graph = graph
        self.used = used
        self.nodes: list[onnx.NodeProto] = []

    def fresh(self, hint: str) -> str:
        """A name that no value has."""
        name, number = hint, 0
        while name in self.used:
            number += 1
            name = f"{hint}_{number}"
        self.used.add(name)
        return name

    def node(
        self, op_type: str, inputs: Iterable[str], output: str | None = None, *, hint: str = "", **attributes: Any
    ) -> str:
        """Append a node with one output, named `output` or freshly; its output's name."""
        inputs = list(inputs)
        name = output or self.fresh(hint or f"{inputs[0] if inputs else ''}.{op_type.lower()}")
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"{name}/{op_type}", **attributes))
        return name

    def constant(self, value: Any, dtype: str | np.dtype[Any], hint: str = "constant") -> str:
        """Append a Constant node; its output's name."""
        name = self.fresh(hint)
        tensor = numpy_helper.from_array(np.asarray(value, dtype=dtype), name)
        self.nodes.append(helper.make_node("Constant", [], [name], name=f"{name}/Constant", value=tensor))
        return name

    def finish(self) -> None:
        """Put the collected nodes in the place of the graph's."""
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
