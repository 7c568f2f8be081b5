"""Make products of 16-bit numbers sum in float32: cast both before the product, and the result back after it.

TensorRT makes one kernel of it, which multiplies 16-bit numbers and sums in float32; without the casts it may sum in half precision.

requires: types of what products read.
ensures: no product of two values in float16 or bfloat16 is left, but for weights that are dequantized, whose kernels sum in float32.
"""

from __future__ import annotations

from still_graphs.edits import Writer, is_standard, put_in_place
from still_graphs.later_ir import ir


def sum_products_in_float32(model: ir.Model) -> int:
    """Rewrite the main graph, in place."""
    writer, found = Writer(model.graph), [node for node in model.graph if _is_narrow(node)]
    for node in found:
        writer.place, name = node, node.name or node.outputs[0].name
        old, dtype = node.outputs[0], node.inputs[0].dtype  # type: ignore[union-attr]
        wide = [
            writer.node("Cast", [x], hint=f"{name}.{part}", to=ir.DataType.FLOAT)
            for x, part in zip(node.inputs, "ab", strict=True)
        ]
        product = writer.node("MatMul", wide, hint=f"{name}.sum")
        narrow = writer.node("Cast", [product], hint=f"{name}.rounded", to=dtype)
        put_in_place(old, narrow)
        model.graph.remove(node, safe=True)
    return len(found)


def products_sum_in_float32(model: ir.Model) -> str:
    """The runtime multiplies no 16-bit numbers."""
    left = [str(node.name) for node in model.graph if _is_narrow(node)]
    return f"products that may sum in half precision, {', '.join(left[:3])}" if left else ""


def _is_narrow(node: ir.Node) -> bool:
    """Whether a node multiplies two values of one 16-bit type, neither of them dequantized."""
    if not is_standard(node, "MatMul"):
        return False
    makers = [value.producer() if value is not None else None for value in node.inputs]
    if any(maker is not None and is_standard(maker, "DequantizeLinear") for maker in makers):
        return False
    return any(
        value is not None and value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) for value in node.inputs
    )
