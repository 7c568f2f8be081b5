"""Calls of still::LowRankMatMul for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.low_rank_matmul.plan import Inputs
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import one, stages

_STAGES = stages(2, 3, 4)


_MOVES = [*one("BM", 64, 128), *one("BN", 64, 128), *one("BK", 32, 64), *_STAGES, *one("num_warps", 4, 8)]


_FEW = [*one("BN", 16, 32, 64), *one("BK", 64, 128, 256), *one("BR", 32, 64), *_STAGES, *one("num_warps", 2, 4, 8)]


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    """A LoRA pair of rank 16; those of query, key and value lie side by side."""
    hidden, key = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    rank, outputs = (16, hidden) if layer == "output" else (48, hidden + 2 * key)
    tokens, base = draw.tokens(hidden), draw.tokens(outputs)
    return Inputs(tokens, draw.weight(hidden, rank), draw.weight(rank, outputs), base)


CALLS = Calls(
    draw=_draw,
    flop=lambda x: 2.0 * x.input[..., 0].numel() * (x.inner.numel() + x.outer.numel()),
    moves={"low_rank": _FEW, "lower": _MOVES, "raise": _MOVES},
    decode=frozenset({"low_rank"}),
    layers=("query, key, value", "output"),
    peer="cuBLAS",
)
