"""The least that calls of the causal convolution move and compute: (bytes, FLOP), with 16-bit activations."""

from __future__ import annotations


def cost(channels: int, taps: int, tokens: int, batch: int) -> tuple[float, float]:
    """Of `batch` sequences: tokens in and out, taps, the state read and written once."""
    moved = batch * channels * (2 * tokens + 2 * (taps - 1)) + channels * taps
    return 2 * moved, 2.0 * batch * tokens * channels * taps
