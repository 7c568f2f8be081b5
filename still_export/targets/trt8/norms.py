"""Norms of the first channels alone, as attention to latents has them, without taking the channels apart.

Behind the projection a part of the channels is normalized and set beside the rest, which passes as it is. TensorRT 8.6 compiles that for
prompts, but for a call of one token of one row ends with "No Myelin Error exists" (docs/notebook/tensorrt.md). Written over all channels,
with a mask, the same numbers come of elementwise operators alone.
"""

from __future__ import annotations

import numpy as np

from still_graphs.edits import add_node, is_standard, put_in_place, store, typed
from still_graphs.later_ir import ir


def norm_in_place(model: ir.Model) -> int:
    """Rewrite each Concat of a normalized first part and the rest of one Split, in place."""
    found = [(node, *parts) for node in model.graph if (parts := _parts(node)) is not None]
    for node, norm, split in found:
        _rewrite(model.graph, node, norm, split)
    return len(found)


def whole_norms(model: ir.Model) -> str:
    """No norm takes a part of the channels."""
    left = [str(parts[0].name) for node in model.graph if (parts := _parts(node)) is not None]
    return f"norms of a part of the channels, {', '.join(left[:3])}" if left else ""


def _parts(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The norm and the Split whose outputs a Concat joins; None: it is something else."""
    if not is_standard(node, "Concat") or len(node.inputs) != 2 or node.inputs[0] is None:
        return None
    norm, rest = node.inputs[0].producer(), node.inputs[1]
    if norm is None or not is_standard(norm, "RMSNormalization") or norm.inputs[0] is None or rest is None:
        return None
    split = norm.inputs[0].producer()
    if split is None or not is_standard(split, "Split") or tuple(split.outputs) != (norm.inputs[0], rest):
        return None
    alone = len(node.inputs[0].uses()) == len(norm.inputs[0].uses()) == len(rest.uses()) == 1
    last = [n.attributes.get_int("axis", d) for n, d in ((node, 0), (norm, -1), (split, 0))]
    rank = len(rest.shape or ())
    scale = norm.inputs[1]
    known = scale is not None and scale.const_value is not None and len(scale.const_value.shape) == 1
    return (norm, split) if alone and known and all(a in (-1, rank - 1) for a in last) else None


def _rewrite(graph: ir.Graph, node: ir.Node, norm: ir.Node, split: ir.Node) -> None:
    x, scale, output = split.inputs[0], norm.inputs[1], node.outputs[0]
    assert x is not None and x.dtype is not None and scale is not None and scale.const_value is not None
    weight, dtype = scale.const_value, x.dtype
    assert output.shape is not None
    *free, size = output.shape
    assert isinstance(size, int)
    first = int(weight.shape.numpy()[-1])
    inside = np.arange(size) < first

    def constant(value: np.ndarray, part: str) -> ir.Value:
        return store(graph, ir.tensor(value.astype(np.float32), name=f"{norm.name}.{part}"))

    def padded() -> ir.TensorProtocol:
        return ir.tensor(
            np.concatenate([weight.numpy(), np.ones(size - first, weight.numpy().dtype)]), dtype=weight.dtype
        )

    def then(op: str, part: str, *inputs: ir.Value, attributes: dict[str, int] | None = None) -> ir.Value:
        last = 1 if part in ("sum", "mean", "floored", "root", "factor") else size
        return typed(add_node(graph, node, op, inputs, part, attributes), [*free, last], ir.DataType.FLOAT)

    wide = x if dtype == ir.DataType.FLOAT else then("Cast", "wide", x, attributes={"to": int(ir.DataType.FLOAT)})
    mask = constant(inside, "inside")
    part = then("Mul", "part", wide, mask)
    axis = store(graph, ir.tensor(np.array([-1], np.int64), name=f"{norm.name}.axis"))
    total = then("ReduceSum", "sum", then("Mul", "square", part, part), axis, attributes={"keepdims": 1})
    mean = then("Div", "mean", total, constant(np.array(first), "count"))
    floored = then("Add", "floored", mean, constant(np.array(norm.attributes.get_float("epsilon", 1e-5)), "epsilon"))
    factor = then("Reciprocal", "factor", then("Sqrt", "root", floored))
    factors = then("Add", "factors", then("Mul", "spread", factor, mask), constant(~inside, "outside"))
    result = then("Mul", "normalized", wide, factors)
    if dtype != ir.DataType.FLOAT:
        result = typed(then("Cast", "narrow", result, attributes={"to": int(dtype)}), [*free, size], dtype)
    longer = store(graph, ir.LazyTensor(padded, weight.dtype, ir.Shape([size]), name=f"{scale.name}+ones"))
    put_in_place(output, typed(add_node(graph, node, "Mul", [result, longer], "scaled"), [*free, size], dtype))
    for old in (node, norm, split):
        graph.remove(old, safe=True)
    if scale.name is not None and scale.name in graph.initializers and not scale.uses():
        del graph.initializers[scale.name]
