"""The least that calls of linear attention move and compute: (bytes, FLOP), with 16-bit activations and one query head a state."""

from __future__ import annotations


def prefill_cost(heads: int, key_heads: int, dim: int, size: int, tokens: int, delta: bool) -> tuple[float, float]:
    """Of one empty sequence: activations once; per token the state is read by the query, written by the key, corrected by what it has."""
    moved = tokens * 2 * (2 * key_heads * dim + 2 * heads * size)
    return moved, (6.0 if delta else 4.0) * heads * dim * size * tokens


def decode_cost(heads: int, dim: int, size: int, batch: int, delta: bool) -> tuple[float, float]:
    """Of one decode step: the state in float32 is read and written once."""
    elements = batch * heads * dim * size
    return 8 * elements, (6.0 if delta else 4.0) * elements
