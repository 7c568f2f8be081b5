"""Pass activations to still nodes with heads side by side, [B, T, heads * D], the same memory as [B, T, heads, D].

TensorRT 8.6 compiles the part between two plugins once for each layout of the tensors at its ends. Tensors of four dimensions have two
layouts, one of them for images, so a model without them builds in about half the time. Views of position embeddings, which all layers
share, are made where they are used.

For engines of one row only: several rows decode faster in the layout for images (on an H200, eight rows of Llama-3.1-8B's geometry take
216 us a part instead of 304).

requires: value_info of the activations with numbers of heads and head sizes; constant shapes (fix_shapes).
ensures: no activation of a still node has four dimensions, except those that are float32 in any model (gates, one number a head, whose
size appears nowhere else); each Unsqueeze to [B, T, 1, D] is a separate Reshape at each use.
"""

from __future__ import annotations

from still_graphs.edits import drop_unused, fresh_names, sizes
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS
from still_graphs.spec import TensorSpec


def merge_heads(model: ir.Model) -> int:
    """Rewrite the main graph, in place.

    Raises:
        UnsupportedError: The number of heads or their size is unknown.
    """
    merger = _Merger(model.graph)
    for node in list(model.graph):
        merger.visit(node)
    drop_unused(model.graph)
    return merger.added


class _Merger:
    """Rewrites node by node."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.fresh = graph, fresh_names(graph)
        self.sources: dict[ir.Value, ir.Value] = {}  # input of each Reshape
        self.views: dict[ir.Value, ir.Value] = {}  # input of each Unsqueeze to [B, T, 1, D]
        self.added = 0

    def visit(self, node: ir.Node) -> None:
        """Insert nodes before and after `node`."""
        spec = OPS.get(node.op_type) if node.domain == DOMAIN else None
        for place, value in enumerate(node.inputs):
            if value is not None and spec is not None and place < len(spec.inputs) and _has_heads(spec.inputs[place]):
                node.replace_input_with(place, self.merged_input(value, node))
            elif value in self.views:
                node.replace_input_with(place, self.reshape(self.views[value], sizes(value), str(value.name), node))
        if spec is not None:
            for value, tensor in zip(node.outputs, spec.outputs, strict=False):
                if value.name and _has_heads(tensor):
                    self.part(value, node)
        elif node.domain == "" and node.op_type == "Unsqueeze" and node.inputs[0] is not None and _spread(node):
            self.views[node.outputs[0]] = node.inputs[0]
        elif node.domain == "" and node.op_type == "Reshape" and node.inputs[0] is not None:
            self.reshaped(node, node.inputs[0])

    def reshaped(self, node: ir.Node, reshape_input: ir.Value) -> None:
        """Record the input of a Reshape; let readers of its inverse read that input."""
        source, result = self.sources.get(reshape_input), node.outputs[0]
        known_here = not result.is_graph_output() and all(use.node.graph is self.graph for use in result.uses())
        there = sizes(result)
        if source is not None and known_here and there and None not in there and there == sizes(source):
            ir.convenience.replace_all_uses_with(result, source)
        else:
            self.sources[result] = reshape_input

    def merged_input(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """Activations of a still node with heads side by side."""
        source, dims = self.sources.get(value, self.views.get(value)), _merged(value, node)
        if source is not None and None not in dims and sizes(source) == dims:
            return source
        return self.reshape(value, dims, f"{value.name}.joined", node)

    def part(self, value: ir.Value, node: ir.Node) -> None:
        """Make a still node output heads side by side, and insert the Reshape that separates them after it."""
        name, dims = str(value.name), _merged(value, node)
        apart = self.reshape(value, sizes(value), name, node, behind=True)
        apart.type, self.sources[apart] = value.type, value
        ir.convenience.replace_all_uses_with(value, apart, replace_graph_outputs=True)
        reshape = apart.producer()
        assert reshape is not None
        reshape.replace_input_with(0, value)
        value.name, apart.name, reshape.name = self.fresh(f"{name}.joined"), name, f"{name}/Reshape"
        value.shape = ir.Shape(dims)

    def reshape(
        self, value: ir.Value, dims: list[int | str | None], hint: str, node: ir.Node, behind: bool = False
    ) -> ir.Value:
        """The result of a new Reshape of `value` to `dims`, before or after `node`; the first two dimensions stay."""
        name = self.fresh(f"{hint}.shape")
        tensor = ir.tensor([0, 0, *(int(size or 0) for size in dims[2:])], dtype=ir.DataType.INT64, name=name)
        shape = ir.node("Constant", [], {"value": tensor}, name=f"{name}/Constant")
        shape.outputs[0].name, result = name, hint if behind else self.fresh(hint)
        made = ir.node("Reshape", [value, shape.outputs[0]], name=f"{result}/Reshape")
        made.outputs[0].name, made.outputs[0].shape, made.outputs[0].type = result, ir.Shape(dims), value.type
        (self.graph.insert_after if behind else self.graph.insert_before)(node, [shape, made])
        self.added += 1
        return made.outputs[0]


def _spread(node: ir.Node) -> bool:
    """Whether values of each token, [B, T, D], become [B, T, 1, D], for all heads."""
    assert node.inputs[0] is not None
    reshape_input, dims = sizes(node.inputs[0]) or [None], sizes(node.outputs[0])
    return (
        len(dims) == 4
        and isinstance(dims[3], int)
        and None not in reshape_input
        and dims == [*reshape_input[:2], 1, *reshape_input[2:]]
    )


def _merged(value: ir.Value, node: ir.Node) -> list[int | str | None]:
    """Shape of activations with heads side by side."""
    dims = sizes(value)
    if len(dims) != 4 or not isinstance(dims[2], int) or not isinstance(dims[3], int):
        raise UnsupportedError(
            f"node {node.name or node.op_type}: the heads of {value.name} are unknown; run onnx.shape_inference before lowering."
        )
    return [*dims[:2], dims[2] * dims[3]]


def _has_heads(tensor: TensorSpec) -> bool:
    """Whether plugins read the tensor with heads side by side."""
    return tensor.role == "activation" and tensor.dtype == "T" and len(tensor.shape) == 4
