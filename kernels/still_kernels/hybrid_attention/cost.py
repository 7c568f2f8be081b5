"""The least that calls of hybrid attention move and compute: (bytes, FLOP), with 16-bit activations."""

from __future__ import annotations

from still_kernels.hybrid_attention.config import HybridAttentionConfig


def prefill_cost(config: HybridAttentionConfig, tokens: int) -> tuple[float, float]:
    """Of prefilling one empty row.

    Bytes: activations once, S and the caches once. FLOP: local and salient pairs, both projections, S written and read.
    """
    heads, dim, chunk, rows = config.num_heads, config.head_dim, config.chunk_size, config.projection_dim
    chunks = tokens / chunk
    slots = config.salient_per_chunk * max(0.0, (chunks - 3) * (chunks - 2) / 2) / chunks  # a query's mean
    local = 1.5 * chunk - 0.5
    per_token = 4 * dim * (local + slots) + 4 * dim * rows + 4 * config.state_features * dim
    activations = tokens * dim * 2 * (3 * heads + 2 * config.num_kv_heads)
    state = config.slots_for(tokens) * config.select_heads * dim * 4 + heads * config.state_features * dim * 4
    return activations + state, tokens * heads * per_token


def decode_cost(config: HybridAttentionConfig, context: int, batch: int) -> tuple[float, float]:
    """Of one decode step: caches, window, S and the query projection are read once."""
    heads, dim = config.num_heads, config.head_dim
    slots = config.slots_for(context)
    salient = slots * config.select_heads * dim * 4
    state = heads * config.state_features * (dim + 1) * 4
    window = config.num_kv_heads * 2 * config.chunk_size * dim * 4
    weights = heads * config.projection_dim * dim * 2
    flop = heads * (
        4 * dim * (slots + 1.5 * config.chunk_size) + 2 * dim * (config.projection_dim + config.state_features)
    )
    return batch * (salient + state + window) + weights, batch * flop
