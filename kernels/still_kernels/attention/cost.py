"""The least that calls of softmax attention move and compute: (bytes, FLOP), with 16-bit activations."""

from __future__ import annotations


def prefill_cost(heads: int, kv_heads: int, dim: int, tokens: int) -> tuple[float, float]:
    """Of one empty sequence: activations once, keys and values written to the cache; half of all pairs, as key and as value."""
    return tokens * dim * 2 * (2 * heads + 4 * kv_heads), 2.0 * heads * dim * tokens * (tokens + 1)


def decode_cost(heads: int, kv_heads: int, dim: int, context: int, batch: int) -> tuple[float, float]:
    """Of one decode step: the filled rows of keys and values are read once."""
    return batch * context * kv_heads * dim * 4, 4.0 * batch * heads * dim * context
