"""Fuse nodes for which ONNX Runtime has one kernel: rotary embeddings, and a sum with the norm that reads it.

A step of a small model costs its nodes, on the CPU and in launches on a GPU: of 36 nodes a layer of a Llama 12 go.
"""

from __future__ import annotations

from collections.abc import Sequence

from still_graphs.edits import CONTRIB, add_node, on_last, rank, store
from still_graphs.later_ir import ir
from still_graphs.patterns import Fusion, Match, Op, Val, fuse, fused


def fuse_nodes(model: ir.Model) -> int:
    """Fuse in place; weights are not read."""
    before = len(model.graph)
    fuse(model, ROTARY, NORM_OF_SUM)
    return before - len(model.graph)


def _is_heads(x: ir.Value) -> bool:
    """Whether x is [B, T, H, D] with H and an even D known."""
    *_, heads, size = x.shape if rank(x) == 4 and x.shape else (None, None)
    return isinstance(heads, int) and isinstance(size, int) and size % 2 == 0


def _is_two(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.numpy().reshape(-1).tolist() == [2]


X, ANGLES = Val(_is_heads), (Val(lambda value: rank(value) == 3), Val(lambda value: rank(value) == 3))
SPLIT = Op("Split", X, outputs=2, check=on_last)
TURNED = Op("Concat", Op("Neg", SPLIT[1]), SPLIT[0], check=on_last)
COS, SIN = (Op("Unsqueeze", angles, Val(_is_two)) for angles in ANGLES)
ROTATED = Op("Add", Op("Mul", X, COS), Op("Mul", TURNED, SIN))
TERMS, SCALE = (Val(), Val()), Val()
TOTAL = Op("Add", *TERMS)
NORM = Op("RMSNormalization", TOTAL, SCALE, check=lambda node: on_last(node, -1))


def _is_rotary(match: Match) -> bool:
    return all(_in_halves(match.value(angles), op) for angles, op in zip(ANGLES, ("Cos", "Sin"), strict=True))


def _in_halves(angles: ir.Value, function: str) -> bool:
    """Whether a value is cos or sin of angles whose two halves are equal."""
    inner = angles
    while (step := inner.producer()) is not None and step.op_type in ("Cast", "Mul"):
        # Yarn and others scale both by one number; other factors could make the halves differ.
        values = [v for v in step.inputs if v is not None and (v.const_value is None or v.const_value.size != 1)]
        if len(values) != 1:
            return False
        inner = values[0]
    made = step.inputs[0].producer() if step is not None and step.op_type == function and step.inputs[0] else None
    alike = made is not None and made.op_type == "Concat" and len(made.inputs) == 2 and made.inputs[0] is made.inputs[1]
    return alike and made is not None and made.attributes.get_int("axis", 0) in (-1, 2)


def _rotary(match: Match) -> Sequence[ir.Value]:
    """RotaryEmbedding of [B, T, H * D]; cos and sin are cut to half of [B, T, D], once."""
    add, x = match.node(ROTATED), match.value(X)
    graph, view, shape = add.graph, x.producer(), x.shape
    assert isinstance(graph, ir.Graph) and shape is not None and isinstance(shape[2], int) and isinstance(shape[3], int)
    flat = view.inputs[0] if view is not None and view.op_type == "Reshape" else None
    if flat is None or rank(flat) != 3:
        flat = add_node(graph, add, "Reshape", [x, _shape(graph, "joined", [0, 0, shape[2] * shape[3]])], "joined")
    inputs = [flat, *(_half(graph, match.value(angles)) for angles in ANGLES)]
    rotary = add_node(graph, add, "RotaryEmbedding", inputs, "rotary", {"num_heads": shape[2]})
    return (add_node(graph, add, "Reshape", [rotary, _shape(graph, "heads", [0, 0, shape[2], shape[3]])], "heads"),)


def _half(graph: ir.Graph, angles: ir.Value) -> ir.Value:
    """The first half of an angle's cos or sin, made once."""
    name, maker = f"{angles.name}.half", angles.producer()
    node = next((use.node for use in angles.uses() if use.node.name == name), None)
    if node is None:
        assert maker is not None
        node = ir.node("Split", [angles], {"axis": -1, "num_outputs": 2}, num_outputs=2, name=name)
        for place, output in enumerate(node.outputs):
            output.name = f"{name}{place}"
        graph.insert_after(maker, node)
    return node.outputs[0]


def _shape(graph: ir.Graph, kind: str, values: list[int]) -> ir.Value:
    name = f"rotary.{kind}.{'x'.join(map(str, values[2:]))}"
    known = graph.initializers.get(name)
    return known or store(graph, ir.tensor(values, dtype=ir.DataType.INT64, name=name))


def _has_kernel(match: Match) -> bool:
    """Whether nothing is broadcast and all types are equal: a norm may scale in a wider type than its input's."""
    (x, y), scale = (match.value(term) for term in TERMS), match.value(SCALE)
    alike = x.shape is not None and x.shape == y.shape and rank(x) in (2, 3) and scale.dtype == x.dtype
    return alike and rank(scale) == 1 and not match.value(TOTAL).is_graph_output()


def _skip_norm(match: Match) -> Sequence[ir.Value]:
    norm = match.node(NORM)
    values = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
    inputs = [match.value(value) for value in (*TERMS, SCALE)]
    out, mean, variance, total = match.add(
        "SkipSimplifiedLayerNormalization", inputs, values, name=norm.name or "", domain=CONTRIB, outputs=4
    )
    mean.name = variance.name = ""
    return out, total


ROTARY = Fusion((ROTATED,), _rotary, _is_rotary, alone=False)
"""x * cos + concat(-x2, x1) * sin for x [B, T, H, D]."""

NORM_OF_SUM = Fusion((NORM, TOTAL), _skip_norm, _has_kernel, at=TOTAL)
"""x + y, read by an RMSNorm over the last axis and possibly others: one op gives both."""

nodes_fused = fused(ROTARY, NORM_OF_SUM)
