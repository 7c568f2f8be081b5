"""Rewrite a graph for an older opset of ai.onnx, the newest that a host reads.

requires: no functions; reduction axes are constants; activation types of RMSNormalization and Gelu inferable from the graph.
ensures: every node is valid at that opset; norms compute in float32 through explicit casts, as RMSNormalization's stash_type says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from still_graphs.conditions import Condition, opset_at_most
from still_graphs.edits import Writer, attribute, constant_value, fresh_names, graphs_of
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir

IR_VERSIONS = {17: 8, 21: 10}
REDUCTIONS = (
    "Max",
    "Min",
    "Mean",
    "Prod",
    "L1",
    "L2",
    "LogSum",
    "LogSumExp",
    "SumSquare",
)  # Sum has axes as input since 13


def lowering(
    opset: int, own: Mapping[str, Callable[[ir.Node, Lowering], int]] | None = None
) -> tuple[Callable[[ir.Model], int], Condition]:
    """The pass that rewrites what is newer than `opset`, in place, and its condition.

    Args:
        own: Writers of a host that reads an operator otherwise, by the operator; they take the place of the ones here.

    The pass counts nodes, and raises UnsupportedError where a node has no equivalent, or a fact that its rewriting needs is unknown.
    """
    writers = {name: writer for name, (since, writer) in WRITERS.items() if opset < since} | dict(own or {})

    def lower_opset(model: ir.Model) -> int:
        current = model.opset_imports.get("", 0)
        if current <= opset:
            return 0
        fresh, changed = fresh_names(model.graph), 0
        for graph in graphs_of(model):
            writer = Lowering(graph, fresh, opset)
            for node in list(graph):
                writer.place = node
                write = writers.get(node.op_type) if node.domain == "" else None
                if write is not None:
                    changed += write(node, writer)
                else:
                    _check(node, current, writer)
        model.opset_imports[""] = opset
        model.ir_version = min(model.ir_version, IR_VERSIONS[opset])
        return changed

    return lower_opset, opset_at_most(opset)


class Lowering(Writer):
    """A Writer that knows its opset."""

    def __init__(self, graph: ir.Graph, fresh: Callable[[str], str], opset: int) -> None:
        super().__init__(graph, fresh)
        self.opset = opset

    def unsupported(self, node: ir.Node, why: str) -> UnsupportedError:
        """An error that names a node, and why it has no form in the opset."""
        return UnsupportedError(
            f"node {node.name or node.outputs[0].name}: {node.op_type} cannot be written in opset {self.opset}: it {why}. "
            "Export for onnx, or report the model."
        )

    def mean(self, value: ir.Value, hint: str) -> ir.Value:
        """The mean over the last axis, which is kept."""
        if self.opset < 18:
            return self.node("ReduceMean", [value], hint=hint, axes=[-1], keepdims=1)
        return self.node("ReduceMean", [value, self.constant([-1], "int64", f"{hint}.axes")], hint=hint, keepdims=1)


def _check(node: ir.Node, current: int, r: Lowering) -> None:
    """Accept a node whose operator only gained types and attributes since the writer's opset; drop attributes that it lacks there."""
    if node.domain != "":
        return
    import onnx

    new = onnx.defs.get_schema(node.op_type, current)
    try:
        old = onnx.defs.get_schema(node.op_type, r.opset)
    except onnx.defs.SchemaError:
        raise r.unsupported(node, "is not in it") from None
    if new.since_version > r.opset and not old.min_input <= len(node.inputs) <= old.max_input:
        raise r.unsupported(node, "has other inputs in it")
    for name in [name for name in node.attributes if name not in old.attributes]:
        if attribute(node, name) != ir.serde.deserialize_attribute(new.attributes[name].default_value).value:
            raise r.unsupported(node, f"has no {name} in it")
        del node.attributes[name]


def _type(node: ir.Node, r: Lowering) -> ir.DataType:
    found = next((v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None), None)
    if found is None:
        raise r.unsupported(
            node, "needs the type of its input, which is unknown; run onnx.shape_inference first, as it"
        )
    return found


def rms_normalization(
    node: ir.Node, r: Lowering, settle: Callable[[Lowering, ir.Value, ir.Value, ir.Value], ir.Value] | None = None
) -> int:
    """y = x / sqrt(mean(x^2) + epsilon) * scale, the first part in float32; `settle` gets that part, the mean and x, and gives it again."""
    axis = attribute(node, "axis", -1)
    if axis != -1:
        raise r.unsupported(node, f"is handled for axis -1 only, here it has axis {axis};")
    (x, scale), dtype, hint = node.inputs, _type(node, r), node.name or node.outputs[0].name
    assert x is not None
    wide = x if dtype == ir.DataType.FLOAT else r.node("Cast", [x], hint=f"{hint}.wide", to=ir.DataType.FLOAT)
    square = r.node("Mul", [wide, wide], hint=f"{hint}.square")
    mean = r.mean(square, f"{hint}.mean")
    epsilon = r.constant(attribute(node, "epsilon", 1e-5), "float32", f"{hint}.epsilon")
    root = r.node("Sqrt", [r.node("Add", [mean, epsilon], hint=f"{hint}.floored")], hint=f"{hint}.root")
    result = r.node("Div", [wide, root], hint=f"{hint}.normalized")
    if settle is not None:
        result = settle(r, result, mean, wide)
    if dtype != ir.DataType.FLOAT:
        result = r.node("Cast", [result], hint=f"{hint}.narrow", to=dtype)
    r.instead(node, "Mul", [result, scale])
    return 1


def _split(node: ir.Node, r: Lowering) -> int:
    """Opset 17 splits into equal parts without sizes; the dimension must be divisible, which shape inference checks."""
    return int(node.attributes.pop("num_outputs", None) is not None)


def _reduction(node: ir.Node, r: Lowering) -> int:
    if len(node.inputs) < 2 or node.inputs[1] is None:
        if attribute(node, "noop_with_empty_axes", 0):
            raise r.unsupported(node, "has no noop_with_empty_axes in it")
        axes = None
    else:
        axes = constant_value(node.inputs[1])
        if axes is None:
            raise r.unsupported(node, "needs constant axes in it")
        node.attributes.add(ir.AttrInt64s("axes", [int(a) for a in axes.reshape(-1)]))
    node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    return int(axes is not None)


def _gelu(node: ir.Node, r: Lowering) -> int:
    """x/2 * (1 + erf(x/sqrt 2)), or its tanh approximation, in float32."""
    dtype, x, hint = _type(node, r), node.inputs[0], node.name or node.outputs[0].name

    def constant(value: float) -> ir.Value:
        return r.constant(value, "float32", f"{hint}.constant")

    wide = x if dtype == ir.DataType.FLOAT else r.node("Cast", [x], hint=f"{hint}.wide", to=ir.DataType.FLOAT)
    if attribute(node, "approximate", "none") == "tanh":
        cube = r.node("Mul", [r.node("Mul", [wide, wide]), wide])
        inner = r.node("Add", [wide, r.node("Mul", [cube, constant(0.044715)])])
        bent = r.node("Tanh", [r.node("Mul", [inner, constant(math.sqrt(2 / math.pi))])])
    else:
        bent = r.node("Erf", [r.node("Mul", [wide, constant(math.sqrt(0.5))])])
    half = r.node("Mul", [wide, constant(0.5)])
    raised = r.node("Add", [bent, constant(1.0)])
    if dtype == ir.DataType.FLOAT:
        r.instead(node, "Mul", [half, raised])
    else:
        r.instead(node, "Cast", [r.node("Mul", [half, raised])], to=dtype)
    return 1


def _swish(node: ir.Node, r: Lowering) -> int:
    alpha = attribute(node, "alpha", 1.0)
    if alpha != 1.0:
        raise r.unsupported(node, f"is handled for alpha 1 only, here it has {alpha};")
    r.instead(node, "Mul", [node.inputs[0], r.node("Sigmoid", [node.inputs[0]])])
    return 1


def _attention(node: ir.Node, r: Lowering) -> int:
    """softmax(q k^T scale + mask) v, the softmax in float32; q, k and v as [B, H, T, D] with the same heads."""
    q, k, v, mask, *others = [*node.inputs, None]
    if (
        len(node.outputs) > 1
        or any(other is not None for other in others)
        or attribute(node, "is_causal", 0)
        or attribute(node, "softcap", 0.0)
    ):
        raise r.unsupported(node, "is handled without cache, causal flag and soft cap;")
    scale = attribute(node, "scale")
    if scale is None or mask is None or mask.dtype == ir.DataType.BOOL or attribute(node, "q_num_heads") is not None:
        raise r.unsupported(node, "is handled with a scale, an additive mask and four-dimensional inputs;")
    dtype, hint = _type(node, r), node.name or node.outputs[0].name
    wide = dtype == ir.DataType.FLOAT
    factor = r.constant(scale, "float32", f"{hint}.scale")
    if not wide:
        factor = r.node("Cast", [factor], hint=f"{hint}.scale.narrow", to=dtype)
    scaled = r.node("Mul", [q, factor], hint=f"{hint}.scaled")  # before the product, which could overflow
    turned = r.node("Transpose", [k], hint=f"{hint}.turned", perm=[0, 1, 3, 2])
    logits = r.node("MatMul", [scaled, turned], hint=f"{hint}.logits")
    if not wide:
        logits = r.node("Cast", [logits], hint=f"{hint}.wide", to=ir.DataType.FLOAT)
        mask = r.node("Cast", [mask], hint=f"{hint}.mask", to=ir.DataType.FLOAT)
    share = r.node("Softmax", [r.node("Add", [logits, mask], hint=f"{hint}.masked")], hint=f"{hint}.share", axis=-1)
    if not wide:
        share = r.node("Cast", [share], hint=f"{hint}.narrow", to=dtype)
    r.instead(node, "MatMul", [share, v])
    return 1


def _rotary_embedding(node: ir.Node, r: Lowering) -> int:
    """Halves a, b of each head of x [B, H, T, D] by an angle of its token: (a cos - b sin, b cos + a sin), cos and sin [B, T, D/2].

    The exporter makes one of a softmax layer's rotation in float32, where no casts stand between its parts.
    """
    x, *angles = node.inputs
    if (
        x is None
        or len(angles) != 2
        or len(x.shape or ()) != 4
        or attribute(node, "interleaved", 0)
        or attribute(node, "rotary_embedding_dim", 0)
    ):
        raise r.unsupported(node, "is handled for whole heads [B, H, T, D] in halves, with the angles of each token;")
    hint = node.name or node.outputs[0].name
    axes = r.constant([1], "int64", f"{hint}.axis")
    cos, sin = (r.node("Unsqueeze", [angle, axes], hint=f"{angle.name}.heads") for angle in angles if angle is not None)
    parts = {"axis": -1, **({"num_outputs": 2} if r.opset >= 18 else {})}
    split = ir.node("Split", [x], parts, num_outputs=2, name=f"{hint}/Split")
    first, second = r.add(split, [r.fresh(f"{hint}.{half}") for half in ("first", "second")])
    turned = [
        r.node(op, [r.node("Mul", [a, cos]), r.node("Mul", [b, sin])])
        for op, a, b in (("Sub", first, second), ("Add", second, first))
    ]
    r.instead(node, "Concat", turned, axis=-1)
    return 1


WRITERS: dict[str, tuple[int, Callable[[ir.Node, Lowering], int]]] = {
    "RMSNormalization": (23, rms_normalization),
    "Attention": (23, _attention),
    "RotaryEmbedding": (23, _rotary_embedding),
    "Swish": (24, _swish),
    "Gelu": (20, _gelu),
    "Split": (18, _split),
    **{f"Reduce{name}": (18, _reduction) for name in REDUCTIONS},
}
"""Operators, the opset in which they got their present form, and their writers for older ones."""
