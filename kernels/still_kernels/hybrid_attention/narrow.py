"""A linear state in bfloat16 beside a rest: what rounding took, in 256ths of the last place, as int8. `triton_narrow` is the same."""

from __future__ import annotations

import torch
from torch import Tensor

SHIFT = 15
"""Of exponents as float32 has them, from a number to a 256th of the last of its eight places; a smaller number has no rest."""
MOST = 127
"""Of the rest's magnitude: half a last place is 128, and with less a state that nothing is added to stays what it is."""


def narrowed(state: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept of a state in float32, and the rest.

    Returns:
        (bfloat16, rounded to nearest, halves to even; int8, rounded likewise, within MOST), both of the state's shape.
    """
    kept = state.to(torch.bfloat16)
    step = _step(kept)
    rest = torch.where(step > 0, (state.float() - kept.float()) / step, 0)
    return kept, torch.round(rest).clamp(-MOST, MOST).to(torch.int8)


def widened(kept: Tensor, rest: Tensor) -> Tensor:
    """The float32 that they are together: 16 bits of it are right."""
    return kept.float() + rest.float() * _step(kept)


def _step(kept: Tensor) -> Tensor:
    """A 256th of the last place, 0 where float32 has no such number."""
    exponent = (kept.float().view(torch.int32) >> 23) & 0xFF
    return ((exponent - SHIFT).clamp_min(0) << 23).view(torch.float32)
