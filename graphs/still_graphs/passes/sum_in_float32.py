"""Let products with 16-bit weights sum in float32: MatMul becomes still::DenseMatMul.

TensorRT 8.6 sums products of prompts in half precision, whatever type their result is asked for in, and states are then 1.5 to 2.8 times as
far off as PyTorch's. A weight that is transposed (a head that is the embedding too) is read as it lies: an engine whose weights can be
replaced (REFIT) folds nothing into them and transposed it anew in each call.

requires: types and shapes of what products read.
ensures: no product of tokens [B, T, I] and a float16 weight is left to the runtime.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_graphs.passes.walk import attribute, dimensions, drop_unused, element_types, initializers, set_opset


@on_proto
def sum_in_float32(model: onnx.ModelProto) -> int:
    """Rewrite the main graph, in place.

    Returns:
        Number of products.
    """
    graph = model.graph
    weights, dims, types = initializers(graph), dimensions(graph), element_types(graph)
    turned = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose" and list(attribute(node, "perm", [1, 0])) == [1, 0] and node.input[0] in weights
    }
    changed = 0
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type != "MatMul":
            continue
        left, right = node.input
        weight = weights.get(turned.get(right, right))
        if weight is None or weight.data_type != TensorProto.FLOAT16 or len(weight.dims) != 2:
            continue
        if types.get(left) != TensorProto.FLOAT16 or len(dims.get(left, ())) != 3:
            continue
        node.input[:] = [left, "", weight.name] if right in turned else [left, weight.name]
        node.op_type, node.domain = DENSE_MATMUL.name, DOMAIN
        if node.output[0] not in types:  # which nothing infers behind a node of ours
            outputs = weight.dims[0 if right in turned else 1]
            info = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT16, [*dims[left][:2], outputs])
            graph.value_info.append(info)
        changed += 1
    if changed:
        set_opset(model, DOMAIN, DENSE_MATMUL.version)
        drop_unused(graph)
    return changed
