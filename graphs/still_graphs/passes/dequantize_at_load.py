"""Replace MatMulNBits by DequantizeLinear and a product, which a host folds to float32 when it loads the graph.

onnxruntime-web has no kernel of MatMulNBits: it dequantizes the whole matrix on every call, nine tenths of a step
(docs/notebook/web.md). Its bytes are read as they are: two numbers of 4 bits lie in a byte in the order of UINT4, so a weight gets
another type and shape over the same place of the file. What does not fit in EXPANDED_BYTES stays, computed in float32 as well.

requires: weights of MatMulNBits are initializers in a file, scales are constant.
ensures: all products with low-bit weights compute in float32.
"""

from __future__ import annotations

from still_graphs.edits import CONTRIB, Writer, attribute, put_in_place, store, typed
from still_graphs.later_ir import ir

EXPANDED_BYTES = 1 << 30
"""Float32 bytes of weights dequantized at load. wasm has 4 GB for them, their file, packed copies and states. With half as much again, a
package of Qwen3.5-0.8B's sizes used 4.5 GB of a browser (docs/notebook/web.md)."""

FLOAT32_ACTIVATIONS = 1
"""`accuracy_level` of MatMulNBits; 4 rounds activations to 8 bits where the host has a kernel for that, as on CPUs and not in a browser."""
PER_BYTE = {4: 2, 8: 1}


def dequantize_at_load(model: ir.Model) -> int:
    """Replace nodes in their order until EXPANDED_BYTES are spent; the others compute in float32 too."""
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
    """Replace the node; False if its blocks are not laid out as UINT4's, or have other readers."""
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
    """Set another type and shape of an initializer over the same bytes."""
    held = value.const_value
    if isinstance(held, ir.ExternalTensor):
        place = held.location, held.offset, held.length
        value.const_value = ir.ExternalTensor(
            *place, dtype, shape=ir.Shape(shape), name=str(value.name), base_dir=held.base_dir
        )
    else:
        assert held is not None
        value.const_value = _tensor(held.tobytes(), dtype, shape, str(value.name))
    typed(value, shape, dtype)


def _tensor(raw: bytes, dtype: ir.DataType, shape: list[int], name: str) -> ir.TensorProtocol:
    import onnx

    return ir.serde.deserialize_tensor(onnx.TensorProto(raw_data=raw, data_type=dtype, dims=shape, name=name))
