"""Function bodies of still::Experts: a loop over the chosen experts; and ONNX Runtime's op for float32 on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import BOOL, FLOAT, INT64, Body, Scope
from still_kernels.experts.spec import EXPERTS

LEAST, NEVER = 1e-30, -1e30
"""The weight that replaces 0 in a logarithm, and the logit of an expert that was not chosen."""


Matrix = Callable[[Scope, str, str], str]
"""Function (scope, input name, expert number) that adds nodes for one expert's matrix, float32 [rows, inputs]."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`, in float32 with weights of the activations' type."""
    b = Scope()
    loop_over_experts(
        b, activation_of(node, dims), dtype, dims, lambda turn, name, e: turn.cast(turn("Gather", name, e), FLOAT)
    )
    return b.function(EXPERTS, node, {"": opset}, "expert")


def loop_over_experts(b: Scope, activation: str, dtype: int, dims: Mapping[str, int], matrix: Matrix) -> None:
    """The output of the op. `matrix` makes the experts' matrices.

    Each iteration processes one chosen expert with all its tokens. (token, expert) pairs are sorted once, and weights of other experts are
    not read.
    """
    tokens = b.reshape(b.cast("input", FLOAT), -1, dims["I"])
    pairs = b.cast(b.reshape("expert", -1), INT64)
    shares = b.reshape("weight", -1, 1)
    chosen, _, place, count = b.multi("Unique", pairs, out=4, sorted=1)
    _, order = b.multi("TopK", place, b("Shape", place), out=2, axis=0, largest=0)
    ends = b("CumSum", count, 0)
    starts = b("Sub", ends, count)

    turn = Scope(b)
    expert = turn("Gather", chosen, "turn")
    bounds = (turn.unsqueeze(turn("Gather", x, "turn"), 0) for x in (starts, ends))
    mine = turn("Slice", order, *bounds, [0])
    token = turn("Div", mine, dims["K"])
    gate_up, down = (turn("Transpose", matrix(turn, name, expert), perm=[1, 0]) for name in ("gate_up", "down"))
    inner = turn("MatMul", turn("Gather", tokens, token), gate_up)
    if activation == "swiglu":
        gate, up = turn.multi("Split", turn.reshape(inner, 0, dims["M"], 2), out=2, axis=2, num_outputs=2)
        inner = turn("Squeeze", turn("Mul", turn("Mul", gate, turn("Sigmoid", gate)), up), [2])
    else:
        relu = turn("Relu", inner)
        inner = turn("Mul", relu, relu)
    part = turn("Mul", turn("MatMul", inner, down), turn("Gather", shares, mine))
    turn("ScatterND", "sum_before", turn.unsqueeze(token, 1), part, out="sum_after", reduction="add")
    turn("Identity", "go_on", out="goes_on")
    body = turn.graph(
        "of_one_expert",
        [("goes_on", BOOL), ("sum_after", FLOAT)],
        [("turn", INT64, []), ("go_on", BOOL, []), ("sum_before", FLOAT, None)],
    )
    total = b("Loop", b("Size", chosen), True, b("Mul", tokens, 0.0), body=body)
    b.cast(b("Reshape", total, b("Shape", "input")), dtype, out="output")


def scattered(b: Scope, dims: Mapping[str, int], values: str, fill: float) -> str:
    """`values` [tokens, K] at the chosen experts, `fill` at others, float32 [tokens, E]."""
    shape = b("Concat", b.dim(values, 0), [dims["E"]], axis=0)
    others = b("ConstantOfShape", shape, value=helper.make_tensor("others", FLOAT, [1], [fill]))
    chosen = b.cast(b.reshape("expert", -1, dims["K"]), INT64)
    return b("ScatterElements", others, chosen, values, axis=1)


def runtime_body(
    node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], imports: Mapping[str, int], domain: str
) -> onnx.FunctionProto | None:
    """The function of `node` around `domain`'s MoE, if that has CPU kernels.

    MoE does its own routing. Any weights can be expressed as their sum times a softmax over logits of the chosen experts.
    """
    if dtype != FLOAT or activation_of(node, dims) != "swiglu":
        return None
    b = Scope()
    weight = b.reshape("weight", -1, dims["K"])
    router = scattered(b, dims, b("Log", b("Max", weight, LEAST)), NEVER)
    mixed = b(
        "MoE",
        *("input", router, "gate_up", None, "down"),
        domain=domain,
        k=dims["K"],
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
        normalize_routing_weights=0,
    )
    # MoE of ONNX Runtime 1.31 returns zeros if it may overwrite its input. This later reader prevents that and changes nothing.
    guarded = b("Where", b.constant(False, "bool"), "input", mixed)
    b("Mul", guarded, b("ReduceSum", "weight", [2], keepdims=1), out="output")
    return b.function(EXPERTS, node, imports, "expert")


def activation_of(node: onnx.NodeProto, dims: Mapping[str, int]) -> str:
    """The activation between the matrices."""
    set_ = {a.name: a.s.decode() for a in node.attribute}
    activation = str(set_.get("activation", EXPERTS.attribute("activation").default))
    rows = {"swiglu": 2 * dims["M"], "relu2": dims["M"]}.get(activation)
    if rows != dims["R"]:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {activation} between {dims['R']} rows and {dims['M']} channels has no body."
        )
    return activation


BODY = Body(function_body, ("I", "E", "K", "R", "M"), runtime=runtime_body)
