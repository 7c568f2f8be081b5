"""Function body of still::Route: scores, choice of groups, choice of experts, their weights; in float32."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_kernels.route.spec import ROUTE

BEST = 2
"""Number of experts whose scores add up to their group's score."""
NEVER = -3.4e38
"""Score of an expert that is no candidate."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    b = Scope()
    set_ = {a.name: a.default for a in ROUTE.attributes} | {
        a.name: helper.get_attribute_value(a) for a in node.attribute
    }
    experts, groups, top = dims["E"], int(set_["groups"]), int(set_["top_groups"])
    if not 1 <= set_["k"] <= experts or groups < 1 or experts % groups or not 1 <= top <= groups:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {set_['k']} of {experts} experts in the best {top} of {groups} groups have no body."
        )
    router = b("Transpose", b.cast("router", FLOAT), perm=[1, 0])
    logits = b("MatMul", b.cast("input", FLOAT), router)
    scores = b("Sigmoid", logits) if set_["score"] == b"sigmoid" else b("Softmax", logits, axis=-1)
    rank = b("Add", scores, "bias") if any(node.input[2:]) else scores
    if groups > 1:
        rank = _of_best_groups(b, rank, groups, experts // groups, top)
    _, chosen = b.multi("TopK", rank, [int(set_["k"])], out=2, axis=-1)
    b.cast(chosen, TensorProto.INT32, out="expert")
    weight = b("GatherElements", scores, chosen, axis=-1)
    if set_["normalize"]:
        # A runtime's sum along the last axis may depend on the memory address of a token's row, and so on other tokens.
        k = int(set_["k"])
        total = b("MatMul", weight, b.constant([[1.0] * k] * k, "float32"))
        weight = b("Div", weight, b("Add", total, float(set_["epsilon"])))
    b("Mul", weight, float(set_["scaling"]), out="weight")
    return b.function(ROUTE, node, {"": opset}, "router")


def _of_best_groups(b: Scope, rank: str, groups: int, size: int, top: int) -> str:
    """Scores [B, T, E], with NEVER for groups that are not among the best."""
    apart = b.reshape(rank, 0, 0, groups, size)
    best, _ = b.multi("TopK", apart, [min(BEST, size)], out=2, axis=-1)
    of_groups = b("ReduceSum", best, [-1], keepdims=0)
    _, taken = b.multi("TopK", of_groups, [top], out=2, axis=-1)
    ones = b("ConstantOfShape", b("Shape", taken), value=helper.make_tensor("one", FLOAT, [1], [1.0]))
    mask = b("ScatterElements", b("Mul", of_groups, 0.0), taken, ones, axis=-1)
    masked = b("Where", b("Greater", b.unsqueeze(mask, 3), 0.0), apart, NEVER)
    return b.reshape(masked, 0, 0, groups * size)


BODY = Body(function_body, ("E",))
