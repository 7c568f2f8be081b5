"""Hand still nodes their activations with the heads side by side, [B, T, heads * D], the same memory as [B, T, heads, D].

Between two plugins TensorRT 8.6 compiles a block of the model as one part, once for each layout of the tensors that enter and leave it.
Tensors of four dimensions have two, one of them for images, so a model builds in about half the time without any: heads lie side by side,
and views of position embeddings, which every layer shares, are made where they are used.

For engines of one row only: several rows decode faster in the layout for images (on an H200, eight rows of Llama-3.1-8B's geometry: 216 us
a part in place of 304).

requires: value_info of the activations with numbers of heads and head sizes; constant shapes (fix_shapes).
ensures: no activation of a still node has four dimensions, but for those that are float32 in any model (gates, one number a head, whose
size nothing else tells); every Unsqueeze to [B, T, 1, D] is a Reshape of its own at each use.
"""

from __future__ import annotations

import onnx
from onnx import helper

from still_graphs.errors import UnsupportedError
from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN, OPS, OpSpec
from still_graphs.ops.spec import TensorSpec
from still_graphs.passes.walk import Rewriter, dimensions, drop_unused, element_types, inner_names, value_names


@on_proto
def merge_heads(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place.

    Returns:
        Number of reshapes added.

    Raises:
        UnsupportedError: The number of heads or their size is unknown.
    """
    graph = model.graph
    joiner = _Joiner(graph)
    for node in graph.node:
        joiner.visit(node)
    joiner.rewriter.finish()
    drop_unused(graph)
    return joiner.added


class _Joiner:
    """Rewrites node by node."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.rewriter = Rewriter(graph, value_names(graph))
        self.dims, self.types = dimensions(graph), element_types(graph)
        # Names that others know.
        self.fixed = {name for node in graph.node for name in inner_names(node)} | {
            output.name for output in graph.output
        }
        self.sources: dict[str, str] = {}  # what each Reshape reads
        self.views: dict[str, str] = {}  # what each Unsqueeze to [B, T, 1, D] reads
        self.renamed: dict[str, str] = {}
        self.added = 0

    def visit(self, node: onnx.NodeProto) -> None:
        """Append `node` with what belongs before and behind it."""
        for index, name in enumerate(node.input):
            node.input[index] = self.renamed.get(name, name)
        still = node.domain == DOMAIN and node.op_type in OPS
        if still:
            self.join_inputs(node, OPS[node.op_type])
        for index, name in enumerate(node.input):
            if name in self.views:
                node.input[index] = self.reshape(self.views[name], self.dims[name], name)
        if still:
            self.rewriter.nodes.append(node)
            self.part_outputs(node, OPS[node.op_type])
            return
        if node.domain == "" and node.op_type == "Unsqueeze" and self.spread(node):
            self.views[node.output[0]] = node.input[0]
        if node.domain == "" and node.op_type == "Reshape":
            source, dims = self.sources.get(node.input[0]), self.dims.get(node.output[0], [None])
            if (
                source is not None
                and None not in dims
                and dims == self.dims.get(source)
                and node.output[0] not in self.fixed
            ):
                self.renamed[node.output[0]] = source  # there and back
                return
            self.sources[node.output[0]] = node.input[0]
        self.rewriter.nodes.append(node)

    def spread(self, node: onnx.NodeProto) -> bool:
        """True where values of each token, [B, T, D], become [B, T, 1, D], for all heads."""
        given, dims = self.dims.get(node.input[0], [None]), self.dims.get(node.output[0], [])
        return len(dims) == 4 and isinstance(dims[3], int) and None not in given and dims == [*given[:2], 1, *given[2:]]

    def join_inputs(self, node: onnx.NodeProto, spec: OpSpec) -> None:
        """Give a still node its activations with their heads side by side."""
        for index, tensor in enumerate(spec.inputs):
            name = node.input[index]
            if name and _has_heads(tensor):
                source = self.sources.get(name, self.views.get(name))
                joined = self.joined(name, node)
                node.input[index] = (
                    source
                    if source and None not in joined and self.dims.get(source) == joined
                    else self.reshape(name, joined, f"{name}.joined")
                )

    def part_outputs(self, node: onnx.NodeProto, spec: OpSpec) -> None:
        """Let a still node leave its heads side by side, and append what parts them."""
        for index, tensor in enumerate(spec.outputs):
            name = node.output[index]
            if name and _has_heads(tensor):
                inner = self.rewriter.fresh(f"{name}.joined")
                self.declare(inner, self.joined(name, node), name)
                node.output[index] = inner
                self.reshape(inner, self.dims[name], name, output=name)
                self.sources[name] = inner

    def joined(self, name: str, node: onnx.NodeProto) -> list[int | str | None]:
        """Shape of activations with their heads side by side."""
        dims = self.dims.get(name, [])
        if len(dims) != 4 or not all(isinstance(size, int) for size in dims[2:]):
            raise UnsupportedError(
                f"node {node.name or node.op_type}: the heads of {name} are unknown; run onnx.shape_inference before lowering."
            )
        return [*dims[:2], int(dims[2] or 0) * int(dims[3] or 0)]

    def reshape(self, name: str, dims: list[int | str | None], hint: str, output: str | None = None) -> str:
        """Append a Reshape to `dims`, whose first two are those of `name`; its output's name."""
        shape = self.rewriter.constant([0, 0, *dims[2:]], "int64", f"{hint}.shape")
        result = self.rewriter.node("Reshape", [name, shape], output, hint=hint)
        if output is None:
            self.declare(result, dims, name)
        self.added += 1
        return result

    def declare(self, name: str, dims: list[int | str | None], like: str) -> None:
        """Tell shape and type of a new value; the type is that of `like`, where it is known."""
        self.dims[name] = dims
        if like in self.types:
            self.types[name] = self.types[like]
            self.graph.value_info.append(helper.make_tensor_value_info(name, self.types[like], dims))


def _has_heads(tensor: TensorSpec) -> bool:
    """Whether plugins take it with its heads side by side."""
    return tensor.role == "activation" and tensor.dtype == "T" and len(tensor.shape) == 4
