"""Confidence intervals for shares over few prompts."""

from __future__ import annotations

import math

DEVIATIONS = 1.96
"""Standard deviations of a 95% confidence interval."""


def interval(value: float, prompts: int) -> tuple[float, float]:
    """Wilson's interval of a share; with partial scores it is wider than necessary."""
    spread = DEVIATIONS**2 / prompts
    half = math.sqrt(value * (1 - value) * spread + spread**2 / 4)
    return max(0.0, (value + spread / 2 - half) / (1 + spread)), min(1.0, (value + spread / 2 + half) / (1 + spread))


def share(value: float, prompts: int) -> str:
    """A share of `prompts` with its interval, in percent."""
    low, high = interval(value, prompts)
    return f"{value:.0%} ({100 * low:.0f} to {100 * high:.0f})"
