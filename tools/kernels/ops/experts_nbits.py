"""Calls of still::ExpertsNBits for bench and tune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from still_kernels.experts import meaning as experts
from still_kernels.experts_nbits.meaning import Inputs
from tools.kernels.calls import Calls, Draw
from tools.kernels.ops.experts import SIZES, flop, moves_of, plain, unread


def _dense(inputs: Inputs) -> experts.Inputs:
    """The call with matrices of numbers."""
    return experts.Inputs(
        inputs.input, inputs.expert, inputs.weight, inputs.dequantized("gate_up"), inputs.dequantized("down"), inputs.activation
    )  # fmt: skip


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    hidden, many, chosen, block = sizes["heads"] * sizes["head_dim"], sizes["experts"], sizes["chosen"], 32
    inner = -(-hidden // 128) * 32
    tokens, expert, weight = draw.tokens(hidden), draw.chosen(many, chosen), draw.shares(chosen)

    def matrix(name: str, rows: int, inputs: int) -> dict[str, Any]:
        blocks = inputs // block
        parts = {"": draw.words(many, rows, inputs // 8), "_scales": draw.scales(many, rows, blocks)}
        return {
            f"{name}{part}": x for part, x in {**parts, "_zero_points": draw.words(many, rows, -(-blocks // 8))}.items()
        }

    return Inputs(tokens, expert, weight, **matrix("gate_up", 2 * inner, hidden), **matrix("down", hidden, inner))


CALLS = Calls(
    draw=_draw,
    flop=flop,
    **moves_of(codes=True),
    sizes=SIZES,
    beside=_dense,
    plain=plain,
    unread=unread,
)
