"""Calls of still::Route for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping

from still_kernels.route.meaning import Inputs, naive_route
from tools.kernels.calls import Calls, Draw
from tools.kernels.settings import one, stages


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    """Qwen3.5-35B-A3B's; or Kimi Linear's."""
    hidden, many = sizes["heads"] * sizes["head_dim"], sizes["experts"]
    tokens, router = draw.tokens(hidden), draw.stack(1, many, hidden)[0]
    if layer == "softmax":
        return Inputs(tokens, router, k=sizes["chosen"], normalize=1)
    return Inputs(tokens, router, draw.shares(many)[0, 0], sizes["chosen"], "sigmoid", 1, 1e-20, 2.446, 8, 4)


_MOVES = [*one("BN", 16, 32, 64), *one("BK", 32, 64, 128, 256), *stages(2, 3, 4), *one("num_warps", 2, 4, 8)]


CALLS = Calls(
    draw=_draw,
    flop=lambda x: 2.0 * x.input[..., 0].numel() * x.router.numel(),
    plain=naive_route,
    layers=("softmax", "sigmoid, groups"),
    moves={"few_scores": _MOVES, "scores": [*one("BM", 32, 64, 128), *_MOVES], "choose": one("num_warps", 1, 2, 4)},
    decode=frozenset({"few_scores", "choose"}),
    sizes={"heads": 16, "experts": 256, "chosen": 8},
)
