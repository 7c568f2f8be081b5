"""Calls of still::GatedMlp for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.gated_mlp.plan import DOWN, GATED, Inputs
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import gemm_calls, one


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    width, middle = sizes["heads"] * sizes["head_dim"], sizes["width"]
    tokens, norm = draw.tokens(width), draw.norm(width)
    return Inputs(tokens, norm, draw.weight(middle, width), draw.weight(width, 2 * middle))


CALLS = Calls(
    draw=_draw,
    flop=lambda x: 2.0 * x.input[..., 0].numel() * (x.down.numel() + x.gate_up.numel()),
    **gemm_calls((GATED, one("BN", 32)), (DOWN, []), split="split_down"),
)
