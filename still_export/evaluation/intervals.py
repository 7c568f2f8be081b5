"""What a share of a few prompts says of the share of all."""

from __future__ import annotations

import math

DEVIATIONS = 1.96
"""Of a 95% confidence interval."""


def interval(value: float, prompts: int) -> tuple[float, float]:
    """Wilson's interval of a share; where prompts count in parts, too, it is wider than it need be."""
    spread = DEVIATIONS**2 / prompts
    half = math.sqrt(value * (1 - value) * spread + spread**2 / 4)
    return max(0.0, (value + spread / 2 - half) / (1 + spread)), min(1.0, (value + spread / 2 + half) / (1 + spread))


def share(value: float, prompts: int) -> str:
    """A share of `prompts` with its interval, in percent."""
    low, high = interval(value, prompts)
    return f"{value:.0%} ({100 * low:.0f} to {100 * high:.0f})"
