"""Join the sum of a product and activations with the norm behind it: still::AddRmsNorm.

Products in few bits take neither, other than those of join_products. TensorRT 8.6 compiles each sum and norm as a part of its own: half of
the build of a small model (docs/notebook/quantization.md).

requires: products of join_products; RMSNormalization as ai.onnx has it since opset 23.
ensures: no norm of the sum of a product and activations [B, T, I], both float16 or bfloat16, is left where something else reads the sum.
"""

from __future__ import annotations

from collections import Counter

import onnx
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN
from still_graphs.ops.add_rms_norm import ADD_RMS_NORM
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from still_graphs.passes.walk import attribute, dimensions, element_types, initializers, inner_names, set_opset

PRODUCTS = (MATMUL_NBITS.name, DENSE_MATMUL.name)
EPSILON = ADD_RMS_NORM.attributes[0].name


def join_norms(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place; results keep their names.

    Returns:
        Number of norms that were joined with the sum before.
    """
    graph = model.graph
    weights, types, dims = initializers(graph), element_types(graph), dimensions(graph)
    makers = {name: node for node in graph.node for name in node.output}
    reads = Counter(name for node in graph.node for name in (*node.input, *inner_names(node)))
    reads.update(output.name for output in graph.output)
    joined = []
    for norm in graph.node:
        total = makers.get(norm.input[0]) if norm.op_type == "RMSNormalization" else None
        if total is None or total.op_type != "Add" or norm.input[1] not in weights or reads[norm.input[0]] < 2:
            continue
        names = [*total.input, *total.output, *norm.output]
        kinds = {types.get(name) for name in (*names, norm.input[1])}
        shapes = [dims.get(name, []) for name in names]
        if kinds not in ({TensorProto.FLOAT16}, {TensorProto.BFLOAT16}) or attribute(norm, "axis", -1) not in (-1, 2):
            continue
        if any(shape != shapes[0] for shape in shapes) or len(shapes[0]) != 3 or set(total.input) & set(weights):
            continue
        if any(
            makers[name].domain == DOMAIN and makers[name].op_type in PRODUCTS for name in total.input if name in makers
        ):
            joined.append((total, norm))
    for total, norm in joined:
        epsilon = {EPSILON: attribute(norm, "epsilon", 1e-5)}
        inputs, outputs = [*total.input, norm.input[1]], [total.output[0], norm.output[0]]
        total.CopyFrom(
            helper.make_node(ADD_RMS_NORM.name, inputs, outputs, name=f"{norm.name}.joined", domain=DOMAIN, **epsilon)
        )
        graph.node.remove(norm)
    if joined:
        set_opset(model, DOMAIN, ADD_RMS_NORM.version)
    return len(joined)
