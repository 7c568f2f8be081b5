"""Merge products of one value, for GPUs: concatenate their weights, split the result.

Query, key, value and gate projections read the same tokens, and so do the two of a gated feed-forward layer. One product of all columns
reads memory in longer runs, and a step of a small model costs its launches. TensorRT merges such products only if it may
rewrite their weights. It may not in engines with replaceable weights, so all are merged for it.

ONNX Runtime's CUDA provider has a kernel that splits the last axis into three parts of any size. For two or four parts of different sizes
it copies the sizes to the device in each call. So query, key and value are merged without the gate, as are both products of a gated
feed-forward layer. On the CPU the split costs more than it gains (docs/notebook/onnxruntime.md).
"""

from __future__ import annotations

import numpy as np

from still_graphs.edits import forget, put_in_place, store
from still_graphs.later_ir import ir

THREE = 3
"""Parts of a product that ONNX Runtime's CUDA provider splits well."""


def merge_linear_layers(model: ir.Model, parts: int | None = None) -> int:
    """Merge products in place. Merged weights are read lazily; the separate ones are removed.

    Args:
        parts: Products that are merged, of those of one value the first, or both of two of the same size; None: all that there are.
    """
    found = _groups(model, parts)
    for group in found:
        _merge(model.graph, group)
    return sum(len(group) - 1 for group in found)


def merged(model: ir.Model) -> str:
    """No value is read by several products that could be one."""
    left = [str(group[0].name) for group in _groups(model, None)]
    return f"products that read one value apart, {', '.join(left[:3])}" if left else ""


def _groups(model: ir.Model, parts: int | None) -> list[list[ir.Node]]:
    """Products of the same value, `parts` at a time; None: all."""
    groups: dict[tuple[ir.Value, object, object], list[ir.Node]] = {}
    for node in model.graph:
        weight = node.inputs[1] if node.op_type == "MatMul" and node.domain == "" else None
        if weight is None or node.inputs[0] is None or weight.const_value is None or weight.shape is None:
            continue
        # A weight with other readers stays: merged, it would be stored twice.
        if len(weight.shape) == 2 and len(weight.uses()) == 1 and weight.name in model.graph.initializers:
            groups.setdefault((node.inputs[0], weight.dtype, weight.shape[0]), []).append(node)
    return [group[:parts] for group in groups.values() if len(group) >= (parts or 2) or _alike(group)]


def _alike(group: list[ir.Node]) -> bool:
    """Whether the group is two products of the same size."""
    weights = [node.inputs[1].const_value for node in group if node.inputs[1] is not None]
    shapes = [weight.shape for weight in weights if weight is not None]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def _merge(graph: ir.Graph, group: list[ir.Node]) -> None:
    weights = [node.inputs[1] for node in group]
    tensors, names, sizes = [], [], []
    for weight in weights:
        assert weight is not None and weight.const_value is not None and weight.name is not None
        tensors.append(weight.const_value)
        names.append(weight.name)
        sizes.append(int(weight.const_value.shape.numpy()[1]))
    dtype, height = tensors[0].dtype, int(tensors[0].shape.numpy()[0])

    def read() -> ir.TensorProtocol:
        whole = np.concatenate([tensor.numpy() for tensor in tensors], axis=1)
        for tensor in tensors:
            forget(tensor)
        return ir.tensor(whole, dtype=dtype)

    merged = store(graph, ir.LazyTensor(read, dtype, ir.Shape([height, sum(sizes)]), name="+".join(names)))
    first = group[0]
    product = ir.node("MatMul", [first.inputs[0], merged], name=f"{first.name}.merged")
    shape = first.outputs[0].shape
    if shape is not None:
        product.outputs[0].shape = ir.Shape([*shape[:-1], sum(sizes)])
    product.outputs[0].dtype = dtype
    product.outputs[0].name = f"{first.outputs[0].name}.merged"
    counts = store(graph, ir.tensor(np.array(sizes, np.int64), name=f"{first.outputs[0].name}.sizes"))
    split = ir.node(
        "Split", [product.outputs[0], counts], {"axis": -1}, num_outputs=len(group), name=f"{first.name}.split"
    )
    graph.insert_before(first, [product, split])
    for node, part in zip(group, split.outputs, strict=True):
        put_in_place(node.outputs[0], part)
        graph.remove(node, safe=True)
    for name in names:
        del graph.initializers[name]
