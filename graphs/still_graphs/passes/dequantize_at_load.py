"""Replace MatMulNBits by DequantizeLinear and a product, which a host folds to float32 when it loads the graph.

onnxruntime-web has no kernel of MatMulNBits: it dequantizes the whole matrix on every call, nine tenths of a step
(docs/notebook/web.md). Its bytes are read as they are: two numbers of 4 bits lie in a byte in the order of UINT4, so a weight gets
another type and shape over the same place of the file. What does not fit in EXPANDED_BYTES stays, computed in float32 as well.

requires: weights of MatMulNBits are initializers in a file, scales are constant.
ensures: all products with low-bit weights compute in float32.
"""

from __future__ import annotations

from collections import Counter

import onnx
from onnx import TensorProto, helper

from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import attribute

EXPANDED_BYTES = 1 << 30
"""Of float32 weights that dequantize at load: wasm has 4 GB for them, for the file that they come from, what packs them, and the states.
With half as much again, a package of Qwen3.5-0.8B's sizes took 4.5 GB of a browser (docs/notebook/web.md)."""

CONTRIB = "com.microsoft"
FLOAT32_ACTIVATIONS = 1
"""`accuracy_level` of MatMulNBits; 4 rounds activations to 8 bits where the host has a kernel for that, as on CPUs and not in a browser."""
TYPES = {4: TensorProto.UINT4, 8: TensorProto.UINT8}
PER_BYTE = {4: 2, 8: 1}


@on_proto
def dequantize_at_load(model: onnx.ModelProto) -> int:
    """Replace nodes in their order until EXPANDED_BYTES are spent; the others compute in float32 too.

    Returns:
        Nodes changed.
    """
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    shared = Counter(name for node in graph.node for name in node.input if name in weights)
    added: dict[str, TensorProto] = {}
    nodes: list[onnx.NodeProto] = []
    left, changed = EXPANDED_BYTES, 0
    for node in graph.node:
        if (node.domain, node.op_type) != (CONTRIB, "MatMulNBits"):
            nodes.append(node)
            continue
        changed += 1
        rows, columns = attribute(node, "N"), attribute(node, "K")
        alone = all(shared[name] == 1 for name in (node.input[1], *node.input[3:4]) if name)
        made = _replaced(node, weights, added) if alone and 4 * rows * columns <= left else []
        if made:
            left -= 4 * rows * columns
        else:
            _compute_in_float32(node)
        nodes += made or [node]
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    kept = [added.pop(tensor.name, tensor) for tensor in graph.initializer if tensor.name in used]
    kept += added.values()
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return changed


def _replaced(
    node: onnx.NodeProto, weights: dict[str, TensorProto], added: dict[str, TensorProto]
) -> list[onnx.NodeProto]:
    """The nodes in the place of `node`; none where its blocks do not lie as UINT4's."""
    rows, columns, bits, block = (attribute(node, name) for name in ("N", "K", "bits", "block_size"))
    blocks = columns // block
    given = [*node.input, "", "", ""][:6]
    source, zero = weights.get(given[1]), weights.get(given[3])
    if (
        bits not in TYPES
        or columns % block
        or blocks % PER_BYTE[bits]
        or source is None
        or given[4]
        or (given[3] and not zero)
    ):
        return []
    table = TensorProto(name=given[1], data_type=TYPES[bits], dims=(rows, columns))
    table.data_location = source.data_location
    table.external_data.extend(source.external_data)
    if not source.external_data:
        table.raw_data = source.raw_data
    if zero is None:
        middle = TensorProto(name=f"middle.{bits}.{rows}x{blocks}", data_type=TYPES[bits], dims=(rows, blocks))
        middle.raw_data = bytes([0x88 if bits == 4 else 0x80]) * (rows * blocks // PER_BYTE[bits])
    else:
        middle = TensorProto(name=zero.name, data_type=TYPES[bits], dims=(rows, blocks))
        middle.data_location = zero.data_location
        middle.external_data.extend(zero.external_data)
        if not zero.external_data:
            middle.raw_data = zero.raw_data
    added.update({table.name: table, middle.name: middle})
    weight, product = f"{node.output[0]}.weight", f"{node.output[0]}.product" if given[5] else node.output[0]
    made = [
        helper.make_node(
            "DequantizeLinear", [table.name, given[2], middle.name], [weight], f"{weight}s", axis=1, block_size=block
        ),
        helper.make_node("FusedMatMul", [given[0], weight], [product], node.name, domain=CONTRIB, transB=1),
    ]
    if given[5]:
        made.append(helper.make_node("Add", [product, given[5]], [node.output[0]], f"{node.name}.bias"))
    return made


def _compute_in_float32(node: onnx.NodeProto) -> None:
    for item in node.attribute:
        if item.name == "accuracy_level":
            item.i = FLOAT32_ACTIVATIONS
            return
    node.attribute.append(helper.make_attribute("accuracy_level", FLOAT32_ACTIVATIONS))
