"""The graph in opset 17, the newest that TensorRT 8.6 reads, with two operators rewritten for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from still_graphs.edits import attribute
from still_graphs.later_ir import ir
from still_graphs.passes.lower_opset import Lowering, lowering, rms_normalization


def choose(r: Lowering, result: ir.Value, mean: ir.Value, x: ir.Value) -> ir.Value:
    """A choice that falls on the normalized part, but for a row with NaN, which stays one.

    8.6 compiles choices together with all that surrounds them, up to the next plugins, into fused kernels. Without one it runs a block of
    the model as some 30 layers.
    """
    hint = str(result.name).removesuffix(".normalized")
    sound = r.node("Greater", [mean, r.constant(-1.0, "float32", f"{hint}.never")], hint=f"{hint}.sound")
    return r.node("Where", [sound, result, x], hint=f"{hint}.chosen")


def _shape(node: ir.Node, r: Lowering) -> int:
    """A part of a shape, picked from the whole: 8.6 reads opset 17 but ignores Shape's start and end."""
    start, end = attribute(node, "start", 0), attribute(node, "end")
    if start == 0 and end is None:
        return 0
    if end is None or (start < 0) != (end < 0):
        raise r.unsupported(node, f"is handled for a start and an end counted from one side, here {start} and {end};")
    whole = r.node("Shape", [node.inputs[0]], hint=f"{node.outputs[0].name}.whole")
    r.instead(node, "Gather", [whole, r.constant(list(range(start, end)), "int64")], axis=0)
    return 1


OWN: dict[str, Callable[[ir.Node, Lowering], int]] = {
    "RMSNormalization": partial(rms_normalization, settle=choose),
    "Shape": _shape,
}
lower_opset, lowered = lowering(17, OWN)
