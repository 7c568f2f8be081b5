"""Calls of still::RoundKeyValue for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.round_key_value.plan import Inputs, naive_round_key_value
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import one


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    shape = sizes["kv_heads"], sizes["head_dim"]
    return Inputs(draw.tokens(*shape), draw.tokens(*shape))


CALLS = Calls(
    draw=_draw,
    flop=lambda inputs: 8.0 * inputs.key.numel(),
    plain=naive_round_key_value,
    moves={"round": [*one("BR", 1, 2, 4, 8, 16), *one("num_warps", 1, 2, 4, 8)]},
)
