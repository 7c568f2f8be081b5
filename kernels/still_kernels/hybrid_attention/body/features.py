"""Feature maps phi of the linear part."""

from __future__ import annotations

from still_graphs.functions.builder import Scope
from still_kernels.hybrid_attention.body.layer import Layer

FEATURE_FLOOR = 1e-12


def features(b: Scope, layer: Layer, x: str, weight: str, lead: tuple[str | int, ...], rows: int = 0) -> str:
    """phi(x) in float32.

    Args:
        x: [..., D] float32.
        weight: [..., D, P], broadcast against x.
        lead: Dimensions of the result before F, for the final reshape of the two-sided maps.
        rows: 1 if x has one row (dimension -2), else 0.

    Returns:
        [*lead, F].
    """
    direction = b("MatMul", x, weight)
    name = layer.feature_map
    if name == "identity":
        return direction
    ratio = ""
    if name == "np_softmax_pm":
        ratio = b("ReduceL2", x, [-1])
        if rows == 1:
            # One node instead of three; slower on many rows. 0 stays 0.
            direction = b("LpNormalization", direction, axis=-1, p=2)
        else:
            ratio = b("Div", ratio, b("Max", b("ReduceL2", direction, [-1]), FEATURE_FLOOR))
    if name in ("np_softmax_pm", "softmax_pm"):
        # Both signs on a separate axis: one softmax for the two.
        sign: str = b.constant([[1.0], [-1.0]], "float32")
        if name == "np_softmax_pm":
            sign = b("Mul", ratio if rows == 1 else b.unsqueeze(ratio, -2), sign)
        both = b("Mul", direction if rows == 1 else b.unsqueeze(direction, -2), sign)
        phi = b.reshape(b("Softmax", both, axis=-1), *lead, layer.features)
    elif name == "softmax":
        phi = b("Softmax", direction, axis=-1)
    elif name == "relu":
        phi = b("Relu", direction)
    else:
        phi = b("Add", b("Elu", direction), 1.0)
    return b("Clip", phi, FEATURE_FLOOR, None)
