"""A linear state in bfloat16 with a rest: the rounding error in 256ths of the last place, as int8. `triton_narrow` is the same in
Triton."""

from __future__ import annotations

import torch
from torch import Tensor

SHIFT = 15
"""Float32 exponents from a number to a 256th of the last of its eight places. A smaller number has no rest."""
MOST = 127
"""Largest magnitude of the rest. Half a last place is 128; a smaller bound keeps a state unchanged if nothing is added."""


def narrowed(state: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 state in narrow form.

    Returns:
        (bfloat16, rounded to nearest, halves to even; int8 rest, rounded likewise, within MOST), both of the state's shape.
    """
    high = state.to(torch.bfloat16)
    step = _step(high)
    rest = torch.where(step > 0, (state.float() - high.float()) / step, 0)
    return high, torch.round(rest).clamp(-MOST, MOST).to(torch.int8)


def widened(high: Tensor, rest: Tensor) -> Tensor:
    """The float32 state of both parts, accurate to 16 bits."""
    return high.float() + rest.float() * _step(high)


def _step(high: Tensor) -> Tensor:
    """A 256th of the last place; 0 if it is below float32's range."""
    exponent = (high.float().view(torch.int32) >> 23) & 0xFF
    return ((exponent - SHIFT).clamp_min(0) << 23).view(torch.float32)
