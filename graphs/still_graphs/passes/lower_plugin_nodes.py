"""Write still:: nodes as TensorRT plugin nodes.

The parser hands a plugin only declared attributes, cannot pass an absent input, and looks a plugin up by name, version and
namespace. Counts are int32, the plugin's integer type. Heads lie side by side: TensorRT 8.6 also tries a format for images where the
compiled part between two plugins has a tensor of four dimensions, and then compiles everything twice.

requires: nodes in the order of their OpSpec; no functions of the domain; activation types inferable from the graph; states are inputs
of the graph, with the sizes of heads in their shapes.
ensures: every attribute of the OpSpec is set; plugin_namespace and plugin_version are; absent inputs and outputs are gone from the
lists, `absent_inputs` has their bits; `activation_type` names the activations' type; counts are int32; activations are
[B, T, heads * D].
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.opset import DOMAIN, OPS, OpSpec, TensorSpec
from still_graphs.passes.walk import Rewriter, attribute, drop_attribute, element_types, value_names

ABSENT_INPUTS = "absent_inputs"
ACTIVATION_TYPE = "activation_type"
TYPE_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}


def lower_plugin_nodes(model: onnx.ModelProto) -> int:
    """Rewrite the still:: nodes of the main graph, in place.

    Returns:
        Number of nodes rewritten.

    Raises:
        UnsupportedError: An unknown op, or the activations' type or head size cannot be told.
    """
    graph = model.graph
    types = element_types(graph)
    rewriter = Rewriter(graph, value_names(graph))
    narrowed: dict[str, str] = {}
    shapes = _input_shapes(graph)
    changed = 0
    for node in graph.node:
        spec = OPS.get(node.op_type) if node.domain == DOMAIN else None
        if node.domain == DOMAIN and spec is None:
            raise UnsupportedError(f"{DOMAIN}::{node.op_type} has no plugin; known: {', '.join(sorted(OPS))}.")
        if spec is None or attribute(node, ABSENT_INPUTS) is not None:  # rewritten already
            rewriter.nodes.append(node)
            continue
        activation = _activation_type(node, spec, types)
        behind = _join_heads(node, spec, rewriter, shapes)
        _rewrite(node, spec, activation, types, rewriter, narrowed)
        rewriter.nodes += [node, *behind]
        changed += 1
    rewriter.finish()
    return changed


def _input_shapes(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Shapes of the graph's inputs, 0 where a dimension is free."""
    return {info.name: [d.dim_value for d in info.type.tensor_type.shape.dim] for info in graph.input}


def _join_heads(
    node: onnx.NodeProto, spec: OpSpec, rewriter: Rewriter, shapes: dict[str, list[int]]
) -> list[onnx.NodeProto]:
    """Reshape activations around the node; the reshapes that belong behind it.

    Every size is a number: where one is left to be computed (-1), TensorRT 8.6 reserves memory for batch * tokens squared.
    """
    given = dict(zip(spec.input_names(), node.input, strict=False))
    sizes: dict[str, int] = {}
    for state in spec.states:
        for symbol, size in zip(state.shape, shapes.get(given.get(f"past_{state.name}", ""), ()), strict=False):
            if size:
                sizes[symbol] = size

    def joined(tensor: TensorSpec) -> tuple[int, int] | None:
        """Heads and their size where `tensor` has both as its last dimensions."""
        if tensor.role != "activation" or len(tensor.shape) != 4:
            return None
        missing = [symbol for symbol in tensor.shape[2:] if symbol not in sizes]
        if missing:
            raise UnsupportedError(f"node {node.name or node.op_type}: no state of it tells {', '.join(missing)}.")
        return sizes[tensor.shape[2]], sizes[tensor.shape[3]]

    for index, tensor in enumerate(spec.inputs):
        heads = joined(tensor)
        if heads and node.input[index]:
            name = node.input[index]
            shape = rewriter.constant([0, 0, heads[0] * heads[1]], "int64", f"{name}.joined_shape")
            node.input[index] = rewriter.node("Reshape", [name, shape], hint=f"{name}.joined")
    behind = []
    for index, tensor in enumerate(spec.outputs):
        heads = joined(tensor)
        if heads:
            name = node.output[index]
            node.output[index] = rewriter.fresh(f"{name}.joined")
            inputs = [node.output[index], rewriter.constant([0, 0, *heads], "int64", f"{name}.shape")]
            behind.append(helper.make_node("Reshape", inputs, [name], name=f"{name}/Reshape"))
    return behind


def _activation_type(node: onnx.NodeProto, spec: OpSpec, types: dict[str, int]) -> str:
    """Type of the node's activations."""
    kinds = [t.dtype for t in spec.inputs] + [s.dtype for s in spec.states]
    activation = next(
        (types[n] for n, kind in zip(node.input, kinds, strict=False) if kind == "T" and n in types), None
    )
    if activation not in TYPE_NAMES:
        raise UnsupportedError(
            f"node {node.name or node.op_type}: the type of its activations is unknown or no floating point type; "
            "run onnx.shape_inference before lowering."
        )
    return TYPE_NAMES[activation]


def _rewrite(
    node: onnx.NodeProto,
    spec: OpSpec,
    activation: str,
    types: dict[str, int],
    rewriter: Rewriter,
    narrowed: dict[str, str],
) -> None:
    inputs = list(node.input) + [""] * (len(spec.input_names()) - len(node.input))
    kinds = [t.dtype for t in spec.inputs] + [s.dtype for s in spec.states]
    for index, (name, kind) in enumerate(zip(inputs, kinds, strict=True)):
        if kind == "int64" and name and types.get(name) != TensorProto.INT32:
            if name not in narrowed:
                narrowed[name] = rewriter.node("Cast", [name], hint=f"{name}.int32", to=TensorProto.INT32)
            inputs[index] = narrowed[name]
    absent = sum(1 << index for index, name in enumerate(inputs) if not name)
    missing = {n for n, given in zip(spec.input_names(), inputs, strict=True) if not given}
    outputs = []
    for name, output in zip(spec.output_names(), node.output, strict=False):
        if name.replace("present_", "past_", 1) not in missing:
            outputs.append(output or rewriter.fresh(f"{node.name or node.op_type}.{name}"))
    node.input[:] = [name for name in inputs if name]
    node.output[:] = outputs
    for declared in spec.attributes:
        if attribute(node, declared.name) is None:
            node.attribute.append(helper.make_attribute(declared.name, declared.default))
    values = {
        "plugin_namespace": spec.domain,
        "plugin_version": str(spec.version),
        ABSENT_INPUTS: absent,
        ACTIVATION_TYPE: activation,
    }
    for key, value in values.items():
        drop_attribute(node, key)
        node.attribute.append(helper.make_attribute(key, value))
