"""Calls of still::AddRmsNorm for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.add_rms_norm.plan import Inputs
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import one


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    width = sizes["heads"] * sizes["head_dim"]
    return Inputs(draw.tokens(width), draw.tokens(width), draw.norm(width))


CALLS = Calls(
    draw=_draw,
    flop=lambda inputs: 5.0 * inputs.input.numel(),
    moves={"add_norm": [*one("BC", 512, 1024, 2048, 4096), *one("num_warps", 2, 4, 8, 16)]},
)
