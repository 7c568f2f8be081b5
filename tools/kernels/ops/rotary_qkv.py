"""Calls of still::RotaryQkv for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.rotary_qkv.plan import Inputs
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import one


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    query, key = (sizes[heads] * sizes["head_dim"] for heads in ("heads", "kv_heads"))
    gate = query if layer == "gated" else 0
    numbers, angles = draw.tokens(query + 2 * key + gate), draw.tokens(sizes["head_dim"])
    return Inputs(numbers, angles.cos(), angles.sin(), query, key, key, gate, draw.weight(gate) if gate else None)


CALLS = Calls(
    draw=_draw,
    flop=lambda inputs: 3.0 * inputs.input[..., 0].numel() * (inputs.query_width + inputs.key_width),
    moves={"rotary": [*one("BC", 128, 256, 512, 1024, 2048), *one("num_warps", 1, 2, 4, 8)]},
    layers=("plain", "gated"),
)
