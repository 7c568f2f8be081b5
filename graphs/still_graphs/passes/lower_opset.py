"""Write a graph in ai.onnx opset 17, the newest that TensorRT 8.6 reads and one that every later TensorRT reads too.

With quantized weights in opset 21, the first with blocks of 4 bits and half precision scales: they are for TensorRT 10 and later.

requires: no functions; reduction axes are constants; activation types of RMSNormalization and Gelu inferable from the graph.
ensures: every node is valid at that opset; norms compute in float32 through explicit casts, as RMSNormalization's stash_type says.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx
from onnx import TensorProto, helper

from still_graphs.conditions import opset_at_most
from still_graphs.errors import UnsupportedError
from still_graphs.on_proto import on_proto
from still_graphs.passes.walk import (
    Rewriter,
    attribute,
    constant_value,
    dimensions,
    drop_attribute,
    element_types,
    opset_version,
    set_opset,
    value_names,
    walk_graphs,
)

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
NUMPY_TYPES = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}


def lowest_opset(model: onnx.ModelProto) -> int:
    """The opset that `lower_opset` writes."""
    quantized = any(node.op_type == "DequantizeLinear" and node.domain == "" for node in model.graph.node)
    return QUANTIZED_OPSET if quantized else OPSET


@on_proto
def lowered(model: onnx.ModelProto) -> str:
    """The graph is written in no newer opset than `lower_opset` writes."""
    return opset_at_most(lowest_opset(model))(model)


@on_proto
def lower_opset(model: onnx.ModelProto) -> int:
    """Rewrite what is newer than the opset that TensorRT reads, in place.

    Returns:
        Number of nodes rewritten.

    Raises:
        UnsupportedError: A node has no equivalent there, or a fact that its rewriting needs is unknown.
    """
    current, opset = opset_version(model), lowest_opset(model)
    if current <= opset:
        return 0
    used = value_names(model.graph)
    types: dict[str, int] = {}
    changed = 0
    for graph in walk_graphs(model.graph):
        types |= element_types(graph)
        rewriter = _Lowering(graph, used, opset)
        for node in graph.node:
            writer = WRITERS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            if writer is not None and not (opset == QUANTIZED_OPSET and node.op_type in SINCE_18):
                changed += writer(node, rewriter, types)
            else:
                _check(node, current, opset)
                rewriter.nodes.append(node)
        rewriter.finish()
    set_opset(model, "", opset)
    model.ir_version = min(model.ir_version, IR_VERSIONS[opset])
    return changed


class _Lowering(Rewriter):
    """A Rewriter that knows the opset it writes."""

    def __init__(self, graph: onnx.GraphProto, used: set[str], opset: int) -> None:
        super().__init__(graph, used)
        self.opset = opset

    def mean(self, value: str, hint: str) -> str:
        """The mean over the last axis, which stays."""
        if self.opset < 18:
            return self.node("ReduceMean", [value], hint=hint, axes=[-1], keepdims=1)
        return self.node("ReduceMean", [value, self.constant([-1], "int64", f"{hint}.axes")], hint=hint, keepdims=1)


def _check(node: onnx.NodeProto, current: int, opset: int) -> None:
    """Pass a node whose operator only gained types and attributes since `opset`; drop attributes that it lacks there."""
    if node.domain not in ("", "ai.onnx"):
        return
    new = onnx.defs.get_schema(node.op_type, current)
    try:
        old = onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        raise _unsupported(node, "is not in it") from None
    if new.since_version > opset and not old.min_input <= len(node.input) <= old.max_input:
        raise _unsupported(node, "has other inputs in it")
    for name in [a.name for a in node.attribute if a.name not in old.attributes]:
        default = new.attributes[name].default_value
        if attribute(node, name) != helper.get_attribute_value(default):
            raise _unsupported(node, f"has no {name} in it")
        drop_attribute(node, name)


def _unsupported(node: onnx.NodeProto, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"node {node.name or node.output[0]}: {node.op_type} cannot be written in opset {OPSET}: it {why}. "
        "Export for onnx, or report the model."
    )


def _type(node: onnx.NodeProto, types: dict[str, int]) -> int:
    found = next((types[n] for n in (*node.input, *node.output) if n in types), None)
    if found is None:
        raise _unsupported(node, "needs the type of its input, which is unknown; run onnx.shape_inference first, as it")
    return found


def _rms_normalization(node: onnx.NodeProto, r: _Lowering, types: dict[str, int]) -> int:
    """y = x / sqrt(mean(x^2) + epsilon) * scale, the first part in float32."""
    axis = attribute(node, "axis", -1)
    if axis != -1:
        raise _unsupported(node, f"is handled for axis -1 only, here it has axis {axis};")
    x, scale = node.input
    dtype = _type(node, types)
    hint = node.name or node.output[0]
    wide = x if dtype == TensorProto.FLOAT else r.node("Cast", [x], hint=f"{hint}.wide", to=TensorProto.FLOAT)
    square = r.node("Mul", [wide, wide], hint=f"{hint}.square")
    mean = r.mean(square, f"{hint}.mean")
    epsilon = r.constant(attribute(node, "epsilon", 1e-5), "float32", f"{hint}.epsilon")
    root = r.node("Sqrt", [r.node("Add", [mean, epsilon], hint=f"{hint}.floored")], hint=f"{hint}.root")
    result = r.node("Div", [wide, root], hint=f"{hint}.normalized")
    # A choice that falls on the result, but for a row with NaN, which stays one: TensorRT 8.6 compiles choices together with all that
    # surrounds them, up to the next plugins, into fused kernels. Without one it runs a block of the model as some 30 layers.
    sound = r.node("Greater", [mean, r.constant(-1.0, "float32", f"{hint}.never")], hint=f"{hint}.sound")
    result = r.node("Where", [sound, result, wide], hint=f"{hint}.chosen")
    if dtype != TensorProto.FLOAT:
        result = r.node("Cast", [result], hint=f"{hint}.narrow", to=dtype)
    r.node("Mul", [result, scale], node.output[0])
    return 1


def _split(node: onnx.NodeProto, r: Rewriter, types: dict[str, int]) -> int:
    """Equal parts are what opset 17 makes without sizes; the dimension must divide, which shape inference checks."""
    r.nodes.append(node)
    return int(drop_attribute(node, "num_outputs"))


def _reduction(node: onnx.NodeProto, r: Rewriter, types: dict[str, int]) -> int:
    r.nodes.append(node)
    if len(node.input) < 2 or not node.input[1]:
        if attribute(node, "noop_with_empty_axes", 0):
            raise _unsupported(node, "has no noop_with_empty_axes in it")
        drop_attribute(node, "noop_with_empty_axes")
        del node.input[1:]
        return 0
    axes = constant_value(r.graph, node.input[1])
    if axes is None:
        raise _unsupported(node, "needs constant axes in it")
    del node.input[1:]
    drop_attribute(node, "noop_with_empty_axes")
    node.attribute.append(helper.make_attribute("axes", [int(a) for a in axes.reshape(-1)]))
    return 1


def _gelu(node: onnx.NodeProto, r: Rewriter, types: dict[str, int]) -> int:
    """x/2 * (1 + erf(x/sqrt 2)), or its tanh approximation, in float32."""
    dtype, x, hint = _type(node, types), node.input[0], node.name or node.output[0]

    def constant(value: float) -> str:
        return r.constant(value, "float32", f"{hint}.constant")

    wide = x if dtype == TensorProto.FLOAT else r.node("Cast", [x], hint=f"{hint}.wide", to=TensorProto.FLOAT)
    if attribute(node, "approximate", "none") == "tanh":
        cube = r.node("Mul", [r.node("Mul", [wide, wide]), wide])
        inner = r.node("Add", [wide, r.node("Mul", [cube, constant(0.044715)])])
        bent = r.node("Tanh", [r.node("Mul", [inner, constant(math.sqrt(2 / math.pi))])])
    else:
        bent = r.node("Erf", [r.node("Mul", [wide, constant(math.sqrt(0.5))])])
    half = r.node("Mul", [wide, constant(0.5)])
    raised = r.node("Add", [bent, constant(1.0)])
    if dtype == TensorProto.FLOAT:
        r.node("Mul", [half, raised], node.output[0])
    else:
        r.node("Cast", [r.node("Mul", [half, raised])], node.output[0], to=dtype)
    return 1


def _swish(node: onnx.NodeProto, r: Rewriter, types: dict[str, int]) -> int:
    alpha = attribute(node, "alpha", 1.0)
    if alpha != 1.0:
        raise _unsupported(node, f"is handled for alpha 1 only, here it has {alpha};")
    r.node("Mul", [node.input[0], r.node("Sigmoid", [node.input[0]])], node.output[0])
    return 1


def _attention(node: onnx.NodeProto, r: Rewriter, types: dict[str, int]) -> int:
    """softmax(q k^T scale + mask) v, the softmax in float32; q, k and v as [B, H, T, D] with the same heads."""
    if (
        len(node.output) > 1
        or len(node.input) > 4
        or attribute(node, "is_causal", 0)
        or attribute(node, "softcap", 0.0)
    ):
        raise _unsupported(node, "is handled without cache, causal flag and soft cap;")
    scale = attribute(node, "scale")
    mask = node.input[3] if len(node.input) > 3 else ""
    if scale is None or not mask or types.get(mask) == TensorProto.BOOL or attribute(node, "q_num_heads") is not None:
        raise _unsupported(node, "is handled with a scale, an additive mask and four-dimensional inputs;")
    dtype, hint = _type(node, types), node.name or node.output[0]
    wide = dtype == TensorProto.FLOAT
    factor = r.constant(scale, "float32", f"{hint}.scale")
    if not wide:
        factor = r.node("Cast", [factor], hint=f"{hint}.scale.narrow", to=dtype)
    scaled = r.node("Mul", [node.input[0], factor], hint=f"{hint}.scaled")  # before the product, which could overflow
    turned = r.node("Transpose", [node.input[1]], hint=f"{hint}.turned", perm=[0, 1, 3, 2])
    logits = r.node("MatMul", [scaled, turned], hint=f"{hint}.logits")
    if not wide:
        logits = r.node("Cast", [logits], hint=f"{hint}.wide", to=TensorProto.FLOAT)
        mask = r.node("Cast", [mask], hint=f"{hint}.mask", to=TensorProto.FLOAT)
    share = r.node("Softmax", [r.node("Add", [logits, mask], hint=f"{hint}.masked")], hint=f"{hint}.share", axis=-1)
    if not wide:
        share = r.node("Cast", [share], hint=f"{hint}.narrow", to=dtype)
    r.node("MatMul", [share, node.input[2]], node.output[0])
    return 1


def _rotary_embedding(node: onnx.NodeProto, r: _Lowering, types: dict[str, int]) -> int:
    """Halves a, b of each head of x [B, H, T, D] by an angle of its token: (a cos - b sin, b cos + a sin), cos and sin [B, T, D/2].

    The exporter makes one of a softmax layer's rotation in float32, where no casts stand between its parts.
    """
    x, cos, sin = node.input[:3]
    rank = len(dimensions(r.graph).get(x, []))
    if (
        len(node.input) > 3
        or rank != 4
        or attribute(node, "interleaved", 0)
        or attribute(node, "rotary_embedding_dim", 0)
    ):
        raise _unsupported(node, "is handled for whole heads [B, H, T, D] in halves, with the angles of each token;")
    hint = node.name or node.output[0]
    axes = r.constant([1], "int64", f"{hint}.axis")
    cos, sin = (r.node("Unsqueeze", [angle, axes], hint=f"{angle}.heads") for angle in (cos, sin))
    halves = [r.fresh(f"{hint}.{half}") for half in ("first", "second")]
    r.nodes.append(helper.make_node("Split", [x], halves, name=f"{hint}/Split", axis=-1))
    if r.opset >= 18:
        r.nodes[-1].attribute.append(helper.make_attribute("num_outputs", len(halves)))
    first, second = halves
    turned = [
        r.node(op, [r.node("Mul", [a, cos]), r.node("Mul", [b, sin])])
        for op, a, b in (("Sub", first, second), ("Add", second, first))
    ]
    r.node("Concat", turned, node.output[0], axis=-1)
    return 1


def _shape(node: onnx.NodeProto, r: Rewriter, types: dict[str, int]) -> int:
    """A part of a shape, picked from the whole: TensorRT 8.6 reads opset 17 but ignores Shape's start and end."""
    start, end = attribute(node, "start", 0), attribute(node, "end")
    if start == 0 and end is None:
        r.nodes.append(node)
        return 0
    if end is None or (start < 0) != (end < 0):
        raise _unsupported(node, f"is handled for a start and an end counted from one side, here {start} and {end};")
    whole = r.node("Shape", [node.input[0]], hint=f"{node.output[0]}.whole")
    r.node("Gather", [whole, r.constant(list(range(start, end)), "int64")], node.output[0], axis=0)
    return 1


WRITERS: dict[str, Callable[[onnx.NodeProto, _Lowering, dict[str, int]], int]] = {
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
