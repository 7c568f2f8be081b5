"""Write as one node what ONNX Runtime has one kernel for: rotary embeddings, and a sum together with the norm that reads it.

A step of a small model costs its nodes, on the CPU and in launches on a GPU: of 36 nodes a layer of a Llama 12 go.
"""

from __future__ import annotations

from collections.abc import Iterator

from still_graphs.edits import CONTRIB, add_node, put_in_place, store
from still_graphs.later_ir import ir


def fuse_nodes(model: ir.Model) -> int:
    """Fuse in place; weights are not read.

    Returns:
        Number of nodes that are gone.
    """
    before = len(model.graph)
    _Rotary(model.graph).run()
    if _fuse_norms(model.graph):
        model.graph.opset_imports[CONTRIB] = 1
    return before - len(model.graph)


def _fuse_norms(graph: ir.Graph) -> int:
    """x + y, which an RMSNorm over the last axis reads, and perhaps others: SkipSimplifiedLayerNormalization gives both."""
    fused = 0
    for norm in list(graph):
        total = norm.inputs[0] if norm.op_type == "RMSNormalization" and norm.domain == "" else None
        add = total.producer() if total is not None else None
        if total is None or add is None or add.op_type != "Add" or not _last_axis(norm) or total in graph.outputs:
            continue
        x, y = add.inputs
        if x is None or y is None or x.shape is None or x.shape != y.shape or len(x.shape) not in (2, 3):
            continue
        scale = norm.inputs[1]
        # A norm may scale in a wider type than it reads; the fused op has one for all.
        if scale is None or scale.shape is None or len(scale.shape) != 1 or scale.dtype != x.dtype:
            continue
        normed = norm.outputs[0]
        epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
        node = ir.node(
            "SkipSimplifiedLayerNormalization",
            [x, y, scale],
            {"epsilon": epsilon},
            domain=CONTRIB,
            num_outputs=4,
            name=norm.name,
        )
        out, mean, variance, sum_ = node.outputs
        mean.name = variance.name = ""
        graph.insert_after(add, node)
        put_in_place(normed, out)
        put_in_place(total, sum_)
        graph.remove([norm, add], safe=True)
        fused += 1
    return fused


def _last_axis(norm: ir.Node) -> bool:
    axis = norm.attributes["axis"].as_int() if "axis" in norm.attributes else -1
    shape = norm.inputs[0].shape if norm.inputs[0] is not None else None
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


class _Rotary:
    """x * cos + concat(-x2, x1) * sin for x [B, T, H, D] as RotaryEmbedding of [B, T, H * D]; cos and sin become halves of [B, T, D]."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.halves: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        for node in list(self.graph):
            if node.op_type == "Add" and node.domain == "":
                for turned, straight in (node.inputs, reversed(node.inputs)):
                    if self._fuse(node, straight, turned):
                        break

    def _fuse(self, add: ir.Node, straight: ir.Value | None, turned: ir.Value | None) -> bool:
        for x, cos in _factors(straight):
            for other, sin in _factors(turned):
                angles = [self._angle(cos, "Cos"), self._angle(sin, "Sin")]
                if _rotated(other) is x and None not in angles and _heads(x):
                    self._write(add, x, [angle for angle in angles if angle is not None])
                    return True
        return False

    def _angle(self, value: ir.Value, function: str) -> ir.Value | None:
        """cos or sin [B, T, D] whose halves are equal, of `value` [B, T, 1, D]; None: it is something else."""
        node = _producer(value, "Unsqueeze")
        whole = node.inputs[0] if node is not None else None
        if (
            node is None
            or whole is None
            or whole.shape is None
            or len(whole.shape) != 3
            or _constant(node.inputs[1]) != [2]
        ):
            return None
        inner = whole
        while (step := inner.producer()) is not None and step.op_type in ("Cast", "Mul"):
            # Yarn and others scale both by one number; more of them might tell the halves apart.
            values = [v for v in step.inputs if v is not None and (v.const_value is None or v.const_value.size != 1)]
            if len(values) != 1:
                return None
            inner = values[0]
        made = _producer(inner, function)
        cat = _producer(made.inputs[0], "Concat") if made is not None else None
        if cat is None or len(cat.inputs) != 2 or cat.inputs[0] is not cat.inputs[1] or not _on_last(cat, 3):
            return None
        return whole

    def _write(self, add: ir.Node, x: ir.Value, angles: list[ir.Value]) -> None:
        old = add.outputs[0]
        assert x.shape is not None
        heads, size = x.shape[2], x.shape[3]
        assert isinstance(heads, int) and isinstance(size, int)
        view = _producer(x, "Reshape")
        joined = view.inputs[0] if view is not None else None
        if joined is None or joined.shape is None or len(joined.shape) != 3:
            joined = add_node(self.graph, add, "Reshape", [x, self._shape("joined", [0, 0, heads * size])], "joined")
        inputs = [joined, *(self._half(angle) for angle in angles)]
        rotary = add_node(self.graph, add, "RotaryEmbedding", inputs, "rotary", {"num_heads": heads})
        split = add_node(self.graph, add, "Reshape", [rotary, self._shape("heads", [0, 0, heads, size])], "heads")
        put_in_place(old, split)
        self._drop(add)

    def _half(self, angle: ir.Value) -> ir.Value:
        """The first half of an angle's cos or sin, made once."""
        if angle not in self.halves:
            node = ir.node("Split", [angle], {"axis": -1, "num_outputs": 2}, num_outputs=2, name=f"{angle.name}.half")
            for i, output in enumerate(node.outputs):
                output.name = f"{angle.name}.half{i}"
            maker = angle.producer()
            assert maker is not None
            self.graph.insert_after(maker, node)
            self.halves[angle] = node.outputs[0]
        return self.halves[angle]

    def _shape(self, kind: str, values: list[int]) -> ir.Value:
        name = f"rotary.{kind}.{'x'.join(map(str, values[2:]))}"
        known = self.graph.initializers.get(name)
        return known or store(self.graph, ir.tensor(values, dtype=ir.DataType.INT64, name=name))

    def _drop(self, node: ir.Node) -> None:
        """Remove a node and what only it read."""
        makers = [value.producer() for value in node.inputs if value is not None]
        self.graph.remove(node, safe=True)
        for maker in dict.fromkeys(makers):
            unread = maker is not None and not any(o.uses() or o in self.graph.outputs for o in maker.outputs)
            if maker is not None and unread and maker.graph is not None:
                self._drop(maker)


def _producer(value: ir.Value | None, op: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op and node.domain == "" else None


def _factors(value: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Both orders of a product's factors."""
    node = _producer(value, "Mul")
    if node is not None and node.inputs[0] is not None and node.inputs[1] is not None:
        yield node.inputs[0], node.inputs[1]
        yield node.inputs[1], node.inputs[0]


def _rotated(value: ir.Value) -> ir.Value | None:
    """x, of concat(-second, first) of its halves along the last of four axes; None: `value` is something else."""
    cat = _producer(value, "Concat")
    if cat is None or len(cat.inputs) != 2 or not _on_last(cat, 4):
        return None
    minus = _producer(cat.inputs[0], "Neg")
    split = _producer(cat.inputs[1], "Split")
    if minus is None or split is None or not _on_last(split, 4) or split.inputs[1:] not in ((), (None,)):
        return None
    halves = len(split.outputs) == 2 and split.outputs[0] is cat.inputs[1] and split.outputs[1] is minus.inputs[0]
    return split.inputs[0] if halves else None


def _on_last(node: ir.Node, rank: int) -> bool:
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return axis in (-1, rank - 1)


def _heads(x: ir.Value) -> bool:
    """Whether x is [B, T, H, D] with H and an even D known."""
    shape = x.shape
    return (
        shape is not None
        and len(shape) == 4
        and isinstance(shape[2], int)
        and isinstance(shape[3], int)
        and shape[3] % 2 == 0
    )


def _constant(value: ir.Value | None) -> list[int] | None:
    tensor = value.const_value if value is not None else None
    return None if tensor is None else [int(n) for n in tensor.numpy().reshape(-1)]
