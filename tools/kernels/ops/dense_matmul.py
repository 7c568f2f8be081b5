"""Calls of still::DenseMatMul for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.dense_matmul.plan import GEMM, Inputs
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import gemm_calls


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    hidden, keys = sizes["heads"] * sizes["head_dim"], 2 * sizes["kv_heads"] * sizes["head_dim"]
    tokens = draw.tokens(hidden)
    if layer == "head":
        return Inputs(tokens, turned_weight=draw.weight(hidden, sizes["vocabulary"], turned=True))
    if layer == "output":
        return Inputs(tokens, draw.weight(hidden, hidden), residual=draw.tokens(hidden))
    return Inputs(tokens, draw.weight(hidden, hidden + keys), norm_weight=draw.norm(hidden))


CALLS = Calls(
    draw=_draw,
    flop=lambda inputs: 2.0 * inputs.input[..., 0].numel() * inputs.inner_first.numel(),
    layers=("query, key, value", "output", "head"),
    **gemm_calls((GEMM, []), split="split"),
)
