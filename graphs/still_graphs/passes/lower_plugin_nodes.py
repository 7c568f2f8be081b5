"""Write still:: nodes as TensorRT plugin nodes.

The parser hands a plugin only declared attributes, cannot pass an absent input, and looks a plugin up by name, version and
namespace. Counts are int32, the plugin's integer type. Heads lie side by side: TensorRT 8.6 also tries a format for images where the
compiled part between two plugins has a tensor of four dimensions, and then compiles everything twice.

requires: nodes in the order of their OpSpec; no functions of the domain; activation types inferable from the graph; the head size in
the shape of a weight or a state.
ensures: every attribute of the OpSpec is set; plugin_namespace and plugin_version are; absent inputs and outputs are gone from the
lists, `absent_inputs` has their bits; `activation_type` names the activations' type; counts are int32; activations are
[B, T, heads * D].
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.opset import DOMAIN, OPS, OpSpec
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
    last = _last_dimensions(graph)
    changed = 0
    for node in graph.node:
        spec = OPS.get(node.op_type) if node.domain == DOMAIN else None
        if node.domain == DOMAIN and spec is None:
            raise UnsupportedError(f"{DOMAIN}::{node.op_type} has no plugin; known: {', '.join(sorted(OPS))}.")
        if spec is None or attribute(node, ABSENT_INPUTS) is not None:  # rewritten already
            rewriter.nodes.append(node)
            continue
        activation = _activation_type(node, spec, types)
        behind = _join_heads(node, spec, rewriter, last)
        _rewrite(node, spec, activation, types, rewriter, narrowed)
        rewriter.nodes += [node, *behind]
        changed += 1
    rewriter.finish()
    return changed


def _last_dimensions(graph: onnx.GraphProto) -> dict[str, int]:
    """Last dimension of initializers and graph inputs that tell it."""
    last = {i.name: i.dims[-1] for i in graph.initializer if i.dims}
    for info in graph.input:
        dims = info.type.tensor_type.shape.dim
        if dims and dims[-1].HasField("dim_value"):
            last[info.name] = dims[-1].dim_value
    return last


def _join_heads(node: onnx.NodeProto, spec: OpSpec, rewriter: Rewriter, last: dict[str, int]) -> list[onnx.NodeProto]:
    """Reshape activations around the node; the reshapes that belong behind it."""
    given = dict(zip(spec.input_names(), node.input, strict=False))
    wide = [t for t in (*spec.inputs, *spec.states, *spec.outputs) if t.shape[-1] == "D"]
    sized = (given.get(n) for t in wide for n in (t.name, f"past_{t.name}"))
    size = next((last[name] for name in sized if name in last), None)
    if size is None:
        raise UnsupportedError(f"node {node.name or node.op_type}: no weight or state of it tells the head size.")
    for index, tensor in enumerate(spec.inputs):
        if tensor in wide and len(tensor.shape) == 4 and node.input[index]:
            name = node.input[index]
            joined = rewriter.constant([0, 0, -1], "int64", f"{name}.joined_shape")
            node.input[index] = rewriter.node("Reshape", [name, joined], hint=f"{name}.joined")
    behind = []
    for index, tensor in enumerate(spec.outputs):
        if tensor in wide and len(tensor.shape) == 4:
            name = node.output[index]
            node.output[index] = rewriter.fresh(f"{name}.joined")
            apart = rewriter.constant([0, 0, -1, size], "int64", f"{name}.shape")
            inputs = [node.output[index], apart]
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
