"""Replace MatMulNBits by DequantizeLinear and MatMul, which the runtime folds to float32 when it loads the graph.

onnxruntime-web has no kernel for MatMulNBits. It dequantizes the whole matrix on every call, which takes nine tenths of a step
(docs/notebook/web.md). The stored bytes do not change: two 4-bit numbers share a byte in the order of UINT4, so a weight only gets another
type and shape. Weights beyond EXPANDED_BYTES stay MatMulNBits and also compute in float32.

requires: weights of MatMulNBits are initializers in a file, scales are constant.
ensures: all products with low-bit weights compute in float32.
"""

from __future__ import annotations

from still_graphs.edits import CONTRIB, Writer, attribute, put_in_place, store, typed
from still_graphs.later_ir import ir

EXPANDED_BYTES = 1 << 30
"""Largest size of float32 weights that are dequantized at load. wasm has 4 GB for them, their file, the packing code and the states. With
1.5 times this size, a package of Qwen3.5-0.8B's shape took 4.5 GB of a browser (docs/notebook/web.md)."""

FLOAT32_ACTIVATIONS = 1
"""`accuracy_level` of MatMulNBits. Level 4 rounds activations to 8 bits where the runtime has a kernel for it, on CPUs but not in
browsers."""
PER_BYTE = {4: 2, 8: 1}


def dequantize_at_load(model: ir.Model) -> int:
    """Replace nodes in graph order until EXPANDED_BYTES are used. The rest also compute in float32."""
    left, writer, nodes = EXPANDED_BYTES, Writer(model.graph), _low_bit(model)
    for node in nodes:
        size = 4 * attribute(node, "N") * attribute(node, "K")
        if size <= left and _replace(node, writer):
            left -= size
        else:
            node.attributes.add(ir.AttrInt64("accuracy_level", FLOAT32_ACTIVATIONS))
    return len(nodes)


def float32_products(model: ir.Model) -> str:
    """Products with low-bit weights compute in float32."""
    rounding = [str(n.name) for n in _low_bit(model) if attribute(n, "accuracy_level") != FLOAT32_ACTIVATIONS]
    return f"products that round what they read, {', '.join(rounding[:3])}" if rounding else ""


def _low_bit(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if (node.domain, node.op_type) == (CONTRIB, "MatMulNBits")]


def _replace(node: ir.Node, writer: Writer) -> bool:
    """Replace `node`; False if its blocks do not have UINT4's layout, or another node reads them."""
    rows, columns, bits, block = (attribute(node, name) for name in ("N", "K", "bits", "block_size"))
    x, table, scales, zero, order, bias = [*node.inputs, None, None, None][:6]
    blocks, graph = columns // block, writer.graph
    stored = all(value is None or (value.is_initializer() and len(value.uses()) == 1) for value in (table, zero))
    if bits not in PER_BYTE or columns % block or blocks % PER_BYTE[bits] or table is None or not stored or order:
        return False
    dtype = ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8
    _retype(table, dtype, [rows, columns])
    if zero is None:
        name = f"middle.{bits}.{rows}x{blocks}"
        middle = bytes([0x88 if bits == 4 else 0x80]) * (rows * blocks // PER_BYTE[bits])
        zero = graph.initializers.get(name) or store(graph, _tensor(middle, dtype, [rows, blocks], name))
    else:
        _retype(zero, dtype, [rows, blocks])
    writer.place, output, result = node, node.outputs[0], node.outputs[0].name
    weight = ir.node(
        "DequantizeLinear", [table, scales, zero], {"axis": 1, "block_size": block}, name=f"{result}.weights"
    )
    product = ir.node(
        "FusedMatMul", [x, *writer.add(weight, [f"{result}.weight"])], {"transB": 1}, domain=CONTRIB, name=node.name
    )
    (last,) = writer.add(product, [result if bias is None else f"{result}.product"])
    if bias is not None:
        (last,) = writer.add(ir.node("Add", [last, bias], name=f"{node.name}.bias"), [result])
    put_in_place(output, last)
    graph.remove(node, safe=True)
    return True


def _retype(value: ir.Value, dtype: ir.DataType, shape: list[int]) -> None:
    """Change the type and shape of an initializer; its bytes stay."""
    content = value.const_value
    if isinstance(content, ir.ExternalTensor):
        place = content.location, content.offset, content.length
        value.const_value = ir.ExternalTensor(
            *place, dtype, shape=ir.Shape(shape), name=str(value.name), base_dir=content.base_dir
        )
    else:
        assert content is not None
        value.const_value = _tensor(content.tobytes(), dtype, shape, str(value.name))
    typed(value, shape, dtype)


def _tensor(raw: bytes, dtype: ir.DataType, shape: list[int], name: str) -> ir.TensorProtocol:
    import onnx

    return ir.serde.deserialize_tensor(onnx.TensorProto(raw_data=raw, data_type=dtype, dims=shape, name=name))
