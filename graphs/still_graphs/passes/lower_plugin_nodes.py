"""Rewrite still:: nodes as TensorRT plugin nodes.

The parser passes only declared attributes to a plugin and cannot pass an absent input. It finds a plugin by name, version and namespace.
Counts are int32, the plugin's integer type.

requires: nodes in the order of their OpSpec; no functions of the domain; activation types inferable from the graph.
ensures: every attribute of the OpSpec is set, and plugin_namespace and plugin_version are; absent inputs and outputs are removed and
`absent_inputs` has their bits; `activation_type` names the activations' type; counts are int32.
"""

from __future__ import annotations

from still_graphs.conditions import ABSENT_INPUTS, still_nodes
from still_graphs.edits import Writer, attribute, is_standard, put_in_place
from still_graphs.errors import UnsupportedError, unknown
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS
from still_graphs.spec import CACHE

ACTIVATION_TYPE = "activation_type"
TYPE_NAMES = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


def lower_plugin_nodes(model: ir.Model) -> int:
    """Rewrite the still:: nodes of the main graph, in place.

    Raises:
        UnsupportedError: An unknown op, or the activations' type is unknown.
    """
    writer = Writer(model.graph)
    # int32 values by their int64 casts: plugins read the engine's own inputs, without two casts in between.
    narrowed: dict[ir.Value, ir.Value] = {}
    for node in model.graph:
        if is_standard(node, "Cast") and attribute(node, "to") == ir.DataType.INT64:
            if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.INT32:
                narrowed[node.outputs[0]] = node.inputs[0]
    nodes = [node for node in still_nodes(model) if ABSENT_INPUTS not in node.attributes]
    for node in nodes:
        _rewrite(node, writer, narrowed)
    return len(nodes)


def _rewrite(node: ir.Node, writer: Writer, narrowed: dict[ir.Value, ir.Value]) -> None:
    if node.op_type not in OPS:
        raise unknown(node.op_type, sorted(OPS), f"{DOMAIN}::{node.op_type}", UnsupportedError)
    spec = OPS[node.op_type].resolve({CACHE.name: attribute(node, CACHE.name, CACHE.default)})
    inputs = [*node.inputs, *[None] * (len(spec.input_names()) - len(node.inputs))]
    kinds = [t.dtype for t in spec.inputs] + [s.dtype for s in spec.states]
    typed_values = [(v, kind) for v, kind in zip(inputs, kinds, strict=True) if v is not None]
    activation = next((v.dtype for v, kind in typed_values if kind == "T" and v.dtype is not None), None)
    if activation is None or activation.name not in TYPE_NAMES:
        raise UnsupportedError(
            f"node {node.name or node.op_type}: the type of its activations is unknown or no floating point type; "
            "run onnx.shape_inference before lowering."
        )
    writer.place = node
    for value, kind in typed_values:
        if kind == "int64" and value.dtype != ir.DataType.INT32:
            if value not in narrowed:
                narrowed[value] = writer.node("Cast", [value], hint=f"{value.name}.int32", to=ir.DataType.INT32)
            inputs[inputs.index(value)] = narrowed[value]
    absent = [index for index, value in enumerate(inputs) if value is None]
    missing = {spec.input_names()[index] for index in absent}
    outputs = [
        (name, output)
        for name, output in zip(spec.output_names(), node.outputs, strict=False)
        if name.replace("present_", "past_", 1) not in missing
    ]
    attributes = {a.name: a.default for a in spec.attributes} | {k: a.value for k, a in node.attributes.items()}
    attributes |= {
        "plugin_namespace": spec.domain,
        "plugin_version": str(spec.version),
        ABSENT_INPUTS: sum(1 << index for index in absent),
        ACTIVATION_TYPE: TYPE_NAMES[activation.name],
    }
    plugin = ir.node(
        node.op_type,
        [value for value in inputs if value is not None],
        attributes,
        domain=DOMAIN,
        num_outputs=len(outputs),
        name=node.name,
    )
    writer.add(plugin, [output.name or writer.fresh(f"{node.name or node.op_type}.{name}") for name, output in outputs])
    for (_, old), new in zip(outputs, plugin.outputs, strict=True):
        if old.name:
            put_in_place(old, new)
    writer.graph.remove(node, safe=True)
