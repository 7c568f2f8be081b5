"""Write still:: nodes as TensorRT plugin nodes.

The parser hands a plugin only declared attributes, cannot pass an absent input, and looks a plugin up by name, version and
namespace. Counts are int32, the plugin's integer type.

requires: nodes in the order of their OpSpec; no functions of the domain; activation types inferable from the graph.
ensures: every attribute of the OpSpec is set, `cache` and what goes with it where rows are in 8 bits alone; plugin_namespace and
plugin_version are; absent inputs and outputs are gone from the lists, `absent_inputs` has their bits; `activation_type` names the
activations' type; counts are int32.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN, OPS, OpSpec
from still_graphs.ops.spec import CACHE
from still_graphs.passes.walk import Rewriter, attribute, drop_attribute, element_types, value_names

ABSENT_INPUTS = "absent_inputs"
ACTIVATION_TYPE = "activation_type"
TYPE_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}


@on_proto
def lower_plugin_nodes(model: onnx.ModelProto) -> int:
    """Rewrite the still:: nodes of the main graph, in place.

    Returns:
        Number of nodes rewritten.

    Raises:
        UnsupportedError: An unknown op, or the activations' type cannot be told.
    """
    graph = model.graph
    types = element_types(graph)
    rewriter = Rewriter(graph, value_names(graph))
    narrowed = _int32_origins(graph, types)
    changed = 0
    for node in graph.node:
        spec = OPS.get(node.op_type) if node.domain == DOMAIN else None
        if node.domain == DOMAIN and spec is None:
            raise UnsupportedError(
                f"{DOMAIN}::{node.op_type} is no op of this version; known: {', '.join(sorted(OPS))}."
            )
        if spec is not None:
            _rewrite(node, spec, types, rewriter, narrowed)
            changed += 1
        rewriter.nodes.append(node)
    rewriter.finish()
    return changed


def _int32_origins(graph: onnx.GraphProto, types: dict[str, int]) -> dict[str, str]:
    """The int32 value by the int64 value that was cast from it: plugins read the engine's own inputs, without two casts between."""
    return {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Cast"
        and types.get(node.input[0]) == TensorProto.INT32
        and attribute(node, "to") == TensorProto.INT64
    }


def _rewrite(
    node: onnx.NodeProto, spec: OpSpec, types: dict[str, int], rewriter: Rewriter, narrowed: dict[str, str]
) -> None:
    spec = spec.resolve({CACHE.name: attribute(node, CACHE.name, CACHE.default)})
    inputs = list(node.input) + [""] * (len(spec.input_names()) - len(node.input))
    kinds = [t.dtype for t in spec.inputs] + [s.dtype for s in spec.states]
    activation = next((types[n] for n, kind in zip(inputs, kinds, strict=True) if kind == "T" and n in types), None)
    if activation not in TYPE_NAMES:
        raise UnsupportedError(
            f"node {node.name or node.op_type}: the type of its activations is unknown or no floating point type; "
            "run onnx.shape_inference before lowering."
        )
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
        if attribute(node, declared.name) is None and declared != CACHE:
            node.attribute.append(helper.make_attribute(declared.name, declared.default))
    values = {
        "plugin_namespace": spec.domain,
        "plugin_version": str(spec.version),
        ABSENT_INPUTS: absent,
        ACTIVATION_TYPE: TYPE_NAMES[activation],
    }
    for key, value in values.items():
        drop_attribute(node, key)
        node.attribute.append(helper.make_attribute(key, value))
