"""Write a graph in ai.onnx opset 17, the newest that TensorRT 8.6 reads and one that every later TensorRT reads too.

With quantized weights in opset 21, the first with blocks of 4 bits and half precision scales: they are for TensorRT 10 and later.

requires: no functions; reduction axes are constants; activation types of RMSNormalization and Gelu inferable from the graph.
ensures: every node is valid at that opset; norms compute in float32 through explicit casts, as RMSNormalization's stash_type says.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from still_graphs.conditions import opset_at_most
from still_graphs.edits import Writer, attribute, constant_value, fresh_names, graphs_of, is_standard
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir

OPSET, QUANTIZED_OPSET = 17, 21
IR_VERSIONS = {OPSET: 8, QUANTIZED_OPSET: 10}
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


def lowest_opset(model: ir.Model) -> int:
    """The opset that `lower_opset` writes."""
    quantized = any(is_standard(node, "DequantizeLinear") for node in model.graph)
    return QUANTIZED_OPSET if quantized else OPSET


def lowered(model: ir.Model) -> str:
    """The graph is written in no newer opset than `lower_opset` writes."""
    return opset_at_most(lowest_opset(model))(model)


def lower_opset(model: ir.Model) -> int:
    """Rewrite what is newer than the opset that TensorRT reads, in place.

    Returns:
        Number of nodes rewritten.

    Raises:
        UnsupportedError: A node has no equivalent there, or a fact that its rewriting needs is unknown.
    """
    current, opset = model.opset_imports.get("", 0), lowest_opset(model)
    if current <= opset:
        return 0
    fresh, changed = fresh_names(model.graph), 0
    for graph in graphs_of(model):
        writer = _Lowering(graph, fresh, opset)
        for node in list(graph):
            writer.place = node
            write = WRITERS.get(node.op_type) if node.domain == "" else None
            if write is not None and not (opset == QUANTIZED_OPSET and node.op_type in SINCE_18):
                changed += write(node, writer)
            else:
                _check(node, current, opset)
    model.opset_imports[""] = opset
    model.ir_version = min(model.ir_version, IR_VERSIONS[opset])
    return changed


class _Lowering(Writer):
    """A Writer that knows the opset it writes."""

    def __init__(self, graph: ir.Graph, fresh: Callable[[str], str], opset: int) -> None:
        super().__init__(graph, fresh)
        self.opset = opset

    def mean(self, value: ir.Value, hint: str) -> ir.Value:
        """The mean over the last axis, which stays."""
        if self.opset < 18:
            return self.node("ReduceMean", [value], hint=hint, axes=[-1], keepdims=1)
        return self.node("ReduceMean", [value, self.constant([-1], "int64", f"{hint}.axes")], hint=hint, keepdims=1)


def _check(node: ir.Node, current: int, opset: int) -> None:
    """Pass a node whose operator only gained types and attributes since `opset`; drop attributes that it lacks there."""
    if node.domain != "":
        return
    import onnx

    new = onnx.defs.get_schema(node.op_type, current)
    try:
        old = onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        raise _unsupported(node, "is not in it") from None
    if new.since_version > opset and not old.min_input <= len(node.inputs) <= old.max_input:
        raise _unsupported(node, "has other inputs in it")
    for name in [name for name in node.attributes if name not in old.attributes]:
        if attribute(node, name) != ir.serde.deserialize_attribute(new.attributes[name].default_value).value:
            raise _unsupported(node, f"has no {name} in it")
        del node.attributes[name]


def _unsupported(node: ir.Node, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"node {node.name or node.outputs[0].name}: {node.op_type} cannot be written in opset {OPSET}: it {why}. "
        "Export for onnx, or report the model."
    )


def _type(node: ir.Node) -> ir.DataType:
    found = next((v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None), None)
    if found is None:
        raise _unsupported(node, "needs the type of its input, which is unknown; run onnx.shape_inference first, as it")
    return found


def _rms_normalization(node: ir.Node, r: _Lowering) -> int:
    """y = x / sqrt(mean(x^2) + epsilon) * scale, the first part in float32."""
    axis = attribute(node, "axis", -1)
    if axis != -1:
        raise _unsupported(node, f"is handled for axis -1 only, here it has axis {axis};")
    (x, scale), dtype, hint = node.inputs, _type(node), node.name or node.outputs[0].name
    wide = x if dtype == ir.DataType.FLOAT else r.node("Cast", [x], hint=f"{hint}.wide", to=ir.DataType.FLOAT)
    square = r.node("Mul", [wide, wide], hint=f"{hint}.square")
    mean = r.mean(square, f"{hint}.mean")
    epsilon = r.constant(attribute(node, "epsilon", 1e-5), "float32", f"{hint}.epsilon")
    root = r.node("Sqrt", [r.node("Add", [mean, epsilon], hint=f"{hint}.floored")], hint=f"{hint}.root")
    result = r.node("Div", [wide, root], hint=f"{hint}.normalized")
    # A choice that falls on the result, but for a row with NaN, which stays one: TensorRT 8.6 compiles choices together with all that
    # surrounds them, up to the next plugins, into fused kernels. Without one it runs a block of the model as some 30 layers.
    sound = r.node("Greater", [mean, r.constant(-1.0, "float32", f"{hint}.never")], hint=f"{hint}.sound")
    result = r.node("Where", [sound, result, wide], hint=f"{hint}.chosen")
    if dtype != ir.DataType.FLOAT:
        result = r.node("Cast", [result], hint=f"{hint}.narrow", to=dtype)
    r.instead(node, "Mul", [result, scale])
    return 1


def _split(node: ir.Node, r: _Lowering) -> int:
    """Equal parts are what opset 17 makes without sizes; the dimension must divide, which shape inference checks."""
    return int(node.attributes.pop("num_outputs", None) is not None)


def _reduction(node: ir.Node, r: _Lowering) -> int:
    if len(node.inputs) < 2 or node.inputs[1] is None:
        if attribute(node, "noop_with_empty_axes", 0):
            raise _unsupported(node, "has no noop_with_empty_axes in it")
        axes = None
    else:
        axes = constant_value(node.inputs[1])
        if axes is None:
            raise _unsupported(node, "needs constant axes in it")
        node.attributes.add(ir.AttrInt64s("axes", [int(a) for a in axes.reshape(-1)]))
    node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    return int(axes is not None)


def _gelu(node: ir.Node, r: _Lowering) -> int:
    """x/2 * (1 + erf(x/sqrt 2)), or its tanh approximation, in float32."""
    dtype, x, hint = _type(node), node.inputs[0], node.name or node.outputs[0].name

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


def _swish(node: ir.Node, r: _Lowering) -> int:
    alpha = attribute(node, "alpha", 1.0)
    if alpha != 1.0:
        raise _unsupported(node, f"is handled for alpha 1 only, here it has {alpha};")
    r.instead(node, "Mul", [node.inputs[0], r.node("Sigmoid", [node.inputs[0]])])
    return 1


def _attention(node: ir.Node, r: _Lowering) -> int:
    """softmax(q k^T scale + mask) v, the softmax in float32; q, k and v as [B, H, T, D] with the same heads."""
    q, k, v, mask, *others = [*node.inputs, None]
    if (
        len(node.outputs) > 1
        or any(other is not None for other in others)
        or attribute(node, "is_causal", 0)
        or attribute(node, "softcap", 0.0)
    ):
        raise _unsupported(node, "is handled without cache, causal flag and soft cap;")
    scale = attribute(node, "scale")
    if scale is None or mask is None or mask.dtype == ir.DataType.BOOL or attribute(node, "q_num_heads") is not None:
        raise _unsupported(node, "is handled with a scale, an additive mask and four-dimensional inputs;")
    dtype, hint = _type(node), node.name or node.outputs[0].name
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


def _rotary_embedding(node: ir.Node, r: _Lowering) -> int:
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
        raise _unsupported(node, "is handled for whole heads [B, H, T, D] in halves, with the angles of each token;")
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


def _shape(node: ir.Node, r: _Lowering) -> int:
    """A part of a shape, picked from the whole: TensorRT 8.6 reads opset 17 but ignores Shape's start and end."""
    start, end = attribute(node, "start", 0), attribute(node, "end")
    if start == 0 and end is None:
        return 0
    if end is None or (start < 0) != (end < 0):
        raise _unsupported(node, f"is handled for a start and an end counted from one side, here {start} and {end};")
    whole = r.node("Shape", [node.inputs[0]], hint=f"{node.outputs[0].name}.whole")
    r.instead(node, "Gather", [whole, r.constant(list(range(start, end)), "int64")], axis=0)
    return 1


WRITERS: dict[str, Callable[[ir.Node, _Lowering], int]] = {
    "RMSNormalization": _rms_normalization,
    "Shape": _shape,
    "Split": _split,
    "Attention": _attention,
    "RotaryEmbedding": _rotary_embedding,
    "Gelu": _gelu,
    "Swish": _swish,
    **{f"Reduce{name}": _reduction for name in REDUCTIONS},
}
"""Writers of the operators that opset 17 lacks or spells otherwise."""
SINCE_18 = {"Shape", "Split", *(f"Reduce{name}" for name in REDUCTIONS)}
"""What opset 17 alone has not, or TensorRT 8.6 not as opset 17 says."""
