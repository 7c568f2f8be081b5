"""Calls of still::GreedyToken for bench and tune."""

from __future__ import annotations

from still_kernels.greedy_token.plan import Inputs
from tools.kernels.calls import Calls
from tools.kernels.settings import one

CALLS = Calls(
    draw=lambda sizes, layer, draw: Inputs(draw.fresh(sizes["vocabulary"])),
    flop=lambda inputs: float(inputs.logits.numel()),
    plain=lambda inputs: inputs.logits.argmax(-1).int(),
    moves={"greedy": [*one("BC", 4096, 8192, 16384), *one("num_warps", 8, 16, 32)]},
    decode=frozenset({"greedy"}),
)
