"""Calls of still::SwiGlu for bench and tune."""

from __future__ import annotations

from still_kernels.swi_glu.plan import Inputs
from tools.kernels.calls import Calls
from tools.kernels.settings import one

CALLS = Calls(
    draw=lambda sizes, layer, draw: Inputs(draw.tokens(2 * sizes["width"]), sizes["width"]),
    flop=lambda inputs: 2.0 * inputs.input.numel(),
    moves={"swi_glu": [*one("BC", 256, 512, 1024, 2048, 4096), *one("num_warps", 1, 2, 4, 8)]},
)
