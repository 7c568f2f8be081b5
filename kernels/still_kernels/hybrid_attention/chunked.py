"""The stateful form of hybrid attention in PyTorch, vectorised over chunks: any length, any split, ragged rows.

Each row's new tokens are laid on a grid of chunks that starts at the row's current chunk c0 = length // C. Keys come from one
aligned buffer per row, chunks c0-2 (which may still wait for promotion) to the last, gathered from the ring and the new tokens.
A chunk's contribution to S and z is computed once and reaches the queries by a prefix sum over chunks, delayed by two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.features import feature_map
from still_kernels.hybrid_attention.naive import check_inputs
from still_kernels.hybrid_attention.promotion import Promotion, promote
from still_kernels.hybrid_attention.selection import group_scores, select_tokens, self_saliency
from still_kernels.hybrid_attention.state import HybridAttentionState

SEGMENT_TOKENS = 1024
"""Tokens of one pass; longer calls are cut. Bounds the per-chunk S, 4 GiB for 64K tokens of one Llama-8B layer."""


def chunked_hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    new_tokens: Tensor | None = None,
    window_factor: Tensor | None = None,
) -> tuple[Tensor, HybridAttentionState]:
    """Hybrid attention of new tokens after those that `state` has seen.

    Args:
        query: After RoPE, [B, T, H, D]; T >= 1.
        key, value: [B, T, HK, D], key after RoPE.
        gate: After its sigmoid, [B, T, H, D], or None with gate="none".
        feature_q_weight, feature_k_weight: Projections, Householder folded in, [H, P, D] or [1, P, D].
        config: The layer.
        state: What the rows have seen; unchanged by the call.
        new_tokens: Tokens that each row brings, the rest of the row is padding, int [B]; None = T for every row.
        window_factor: Weight of the softmax terms per head, [H], for training; None = that of `config`.

    Returns:
        output [B, T, H, D], dtype of query, 0 at padding; and the state after the new tokens.

    Raises:
        ShapeError: A tensor does not fit `config`.
        CapacityError: A row outgrows the salient cache with overflow="error".

    Source: STILL, arXiv:2602.02180.
    """
    batch, tokens = check_inputs(query, key, value, gate, config)
    state.check(config, batch)
    if new_tokens is None:
        new_tokens = torch.full((batch,), tokens, dtype=torch.int64, device=query.device)
    if tuple(new_tokens.shape) != (batch,):
        raise ShapeError(f"new_tokens: expected [{batch}], got {list(new_tokens.shape)}.")
    new_tokens = new_tokens.to(torch.int64)
    if int(new_tokens.min()) < 0 or int(new_tokens.max()) > tokens:
        raise ShapeError(f"new_tokens: expected values in 0..{tokens}, got {new_tokens.tolist()}.")
    _check_capacity(state, new_tokens, config)
    if window_factor is None and config.window_factor is not None:
        window_factor = torch.tensor(config.window_factor, dtype=state.kv_state.dtype, device=query.device)
    outputs = []
    for start in range(0, tokens, SEGMENT_TOKENS):
        part = slice(start, start + SEGMENT_TOKENS)
        present = (new_tokens - start).clamp(0, query[:, part].shape[1])
        output, state = _segment(
            query[:, part],
            key[:, part],
            value[:, part],
            None if gate is None else gate[:, part],
            feature_q_weight,
            feature_k_weight,
            config,
            state,
            present,
            window_factor,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def _check_capacity(state: HybridAttentionState, new_tokens: Tensor, config: HybridAttentionConfig) -> None:
    if config.overflow != "error" or not config.salient_per_chunk:
        return
    longest = int((state.length + new_tokens).max())
    if longest > config.capacity_tokens or config.slots_for(longest) > state.slots:
        raise CapacityError(
            f"a row grows to {longest} tokens; capacity_tokens={config.capacity_tokens} and the state has {state.slots} "
            'salient slots. Raise capacity_tokens, or choose overflow="fold_min_score" or "fold_oldest".'
        )


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` [B, h, S, ...] at `index` [B, A], the same for every head: [B, h, A, ...]."""
    shape = (x.shape[0], x.shape[1], index.shape[1], *x.shape[3:])
    return x.gather(2, index.reshape(index.shape[0], 1, index.shape[1], *[1] * (x.dim() - 3)).expand(shape))


def _segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    new: Tensor,
    window_factor: Tensor | None,
) -> tuple[Tensor, HybridAttentionState]:
    """One pass over at most SEGMENT_TOKENS tokens; arguments as of `chunked_hybrid_attention`."""
    batch, tokens, heads, dim = query.shape
    chunk, group = config.chunk_size, config.group_size
    wide = state.kv_state.dtype
    device = query.device
    past = state.length
    first_chunk, offset = past // chunk, past % chunk
    chunks = (tokens + chunk - 2) // chunk + 1  # touched at most, whatever the offset

    # Rows of the query grid: a single token needs one row, not a chunk of them.
    row = offset[:, None] if tokens == 1 else torch.arange(chunk, device=device).expand(batch, chunk)  # [B, R]
    rows = row.shape[1]
    step = (torch.arange(chunks, device=device)[:, None] * chunk + row[:, None] - offset[:, None, None]).flatten(1)
    in_call = (step >= 0) & (step < new[:, None])  # [B, chunks * R]
    safe_step = step.clamp(0, tokens - 1)

    def on_grid(x: Tensor) -> Tensor:  # [B, T, h, D] -> [B, h, chunks * R, D]
        return torch.where(in_call[:, None, :, None], gather_rows(x.transpose(1, 2), safe_step).to(wide), 0)

    q = on_grid(query)

    # Aligned keys: chunks first_chunk - 2 ... first_chunk + chunks - 1.
    position = (first_chunk[:, None] - 2) * chunk + torch.arange((chunks + 2) * chunk, device=device)  # [B, A]
    seen = position < past[:, None]
    held = (position >= 0) & (position >= past[:, None] - 2 * chunk) & (position < (past + new)[:, None])
    source = torch.where(seen, position % (2 * chunk), 2 * chunk + position - past[:, None]).clamp(
        0, 2 * chunk + tokens - 1
    )

    def aligned(ring: Tensor, fresh: Tensor) -> Tensor:  # -> [B, HK, A, D]
        both = torch.cat([ring.to(wide), fresh.transpose(1, 2).to(wide)], dim=2)
        return torch.where(held[:, None, :, None], gather_rows(both, source), 0)

    k, v = aligned(state.window_key, key), aligned(state.window_value, value)

    def windows(x: Tensor) -> Tensor:  # [B, h, A, ...] -> previous and current chunk of each query chunk
        x = x.unflatten(2, (chunks + 2, chunk))
        return torch.cat([x[:, :, 1 : chunks + 1], x[:, :, 2:]], dim=3)  # [B, h, chunks, 2C, ...]

    k_window, v_window = windows(k), windows(v)
    logits = (
        q.unflatten(1, (config.num_kv_heads, group)).unflatten(3, (chunks, rows))
        @ k_window.transpose(-1, -2)[:, :, None]
    )
    logits = logits.flatten(1, 2) * dim**-0.5  # [B, H, chunks, R, 2C]

    column = torch.arange(2 * chunk, device=device)
    ahead = column - chunk - row[..., None]  # [B, R, 2C], key position minus query position
    held_window = windows(held[:, None, :])[:, 0, :, None]  # [B, chunks, 1, 2C]
    causal = held_window & (ahead <= 0)[:, None]  # [B, chunks, R, 2C]
    last_c = causal & (ahead > -chunk)[:, None]
    scores = self_saliency(
        logits,
        (ahead == 0)[:, None, None],
        (column % chunk).expand_as(logits),
        last_c[:, None],
        config,
    )  # [B, H, chunks, R]
    scores = torch.where(in_call[:, None].unflatten(2, (chunks, rows)), scores, 0)

    # Promotion works on whole chunks: aligned chunk j = first_chunk - 2 + j.
    fresh_index = torch.where(seen, 0, position - first_chunk[:, None] * chunk)
    if rows == 1:
        fresh_index = torch.zeros_like(fresh_index)
    fresh_scores = gather_rows(scores.flatten(2), fresh_index.clamp(0, chunks * rows - 1))
    old_scores = gather_rows(state.window_score, position % (2 * chunk))
    all_scores = torch.where(seen[:, None], old_scores, fresh_scores)  # [B, H, A]
    ranked = group_scores(all_scores, config).unflatten(2, (chunks + 2, chunk))[:, :, : chunks + 1]
    selected = select_tokens(ranked, config.salient_per_chunk)  # [B, HS, chunks + 1, k]
    promotion = promote(k, v, ranked, selected, feature_k_weight, config, state, new, chunks)

    # Softmax over window and salient cache with the true row maximum.
    if config.local == "sliding":
        local = causal & (ahead > -config.window)[:, None]
    else:
        local = causal
    softmax = local[:, None].expand_as(logits)
    linear_window = None
    if config.local == "sliding":
        chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(3, selected, True)[:, :, 1:]  # previous chunks
        chosen = torch.nn.functional.pad(chosen, (0, chunk))[:, :, :, None]  # [B, HS, chunks, 1, 2C]
        chosen = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)
        softmax = softmax | (causal[:, None] & chosen)
        linear_window = causal[:, None] & ~softmax
    if config.phantom_first_chunk:
        phantom = ((first_chunk[:, None] + torch.arange(chunks, device=device)) == 0)[..., None, None] & (
            column < chunk
        )
        softmax = softmax | phantom[:, None]
    logits = logits.masked_fill(~softmax, -torch.inf)
    salient_group = heads // promotion.keys.shape[1]
    salient_logits = q.unflatten(1, (-1, salient_group)) @ promotion.keys.transpose(-1, -2)[:, :, None] * dim**-0.5
    salient_logits = salient_logits.unflatten(3, (chunks, rows))  # [B, HS, g, chunks, R, M]
    salient_logits = salient_logits.masked_fill(~promotion.visible[:, :, None, :, None], -torch.inf).flatten(1, 2)
    row_max = torch.cat([logits, salient_logits], dim=-1).amax(-1, keepdim=True)
    row_max = torch.where(row_max.isinf(), 0, row_max).detach()  # padding rows see nothing
    weight, salient_weight = torch.exp(logits - row_max), torch.exp(salient_logits - row_max)
    denominator = weight.sum(-1, keepdim=True) + salient_weight.sum(-1, keepdim=True)
    numerator = weight.unflatten(1, (config.num_kv_heads, group)) @ v_window[:, :, None]
    by_cache = salient_weight.flatten(2, 3).unflatten(1, (-1, salient_group)) @ promotion.values[:, :, None]
    numerator = numerator.flatten(1, 2) + by_cache.flatten(1, 2).unflatten(2, (chunks, rows))
    if window_factor is not None:
        factor = window_factor.to(wide)[:, None, None, None]
        numerator, denominator = factor * numerator, factor * denominator

    # Linear part.
    phi_q = feature_map(q, feature_q_weight, config).unflatten(2, (chunks, rows))
    linear = phi_q @ promotion.kv_state  # [B, H, chunks, R, D]
    mass = phi_q @ promotion.z_state[..., None]
    if linear_window is not None:
        phi_window = windows(feature_map(k.repeat_interleave(group, dim=1), feature_k_weight, config))
        similarity = (phi_q @ phi_window.transpose(-1, -2)).masked_fill(~linear_window, 0)
        linear = linear + similarity @ v_window.repeat_interleave(group, dim=1)
        mass = mass + similarity.sum(-1, keepdim=True)
    if gate is not None:
        linear = on_grid(gate).unflatten(2, (chunks, rows)) * linear
    mixed = ((numerator + linear) / (denominator + mass + config.mix_epsilon)).flatten(2, 3)

    token = torch.arange(tokens, device=device).expand(batch, tokens)
    place = token if rows == 1 else token + offset[:, None]
    output = torch.where((token < new[:, None])[:, None, :, None], gather_rows(mixed, place), 0)
    window = _next_window(state, key, value, all_scores, first_chunk, new)
    present = HybridAttentionState(**window, **_next_cache(state, promotion), length=past + new)
    return output.transpose(1, 2).to(query.dtype), present


def _next_window(
    state: HybridAttentionState, key: Tensor, value: Tensor, scores: Tensor, first_chunk: Tensor, new: Tensor
) -> dict[str, Tensor]:
    """Rings after the new tokens; `scores` [B, H, A] starts at chunk first_chunk - 2."""
    slots = state.window_key.shape[2]
    slot = torch.arange(slots, device=key.device)
    last = (state.length + new - 1)[:, None]
    position = last - (last - slot) % slots  # latest position of each slot, [B, 2C]
    fresh = (position >= state.length[:, None])[:, None, :]
    step = (position - state.length[:, None]).clamp(0, key.shape[1] - 1)
    place = (position - (first_chunk[:, None] - 2) * (slots // 2)).clamp(0, scores.shape[2] - 1)

    def rows(x: Tensor, ring: Tensor) -> Tensor:
        return torch.where(fresh[..., None], gather_rows(x.transpose(1, 2), step).to(ring.dtype), ring)

    return {
        "window_key": rows(key, state.window_key),
        "window_value": rows(value, state.window_value),
        "window_score": torch.where(fresh, gather_rows(scores, place), state.window_score),
    }


def _next_cache(state: HybridAttentionState, promotion: Promotion) -> dict[str, Tensor]:
    """Salient cache, S and z after the call."""
    present = {"kv_state": promotion.kv_state[:, :, -1], "z_state": promotion.z_state[:, :, -1]}

    def write(cache: Tensor, rows: Tensor) -> Tensor:
        index = promotion.slots  # [B, HS, new rows], N where the row has no slot
        spare = (
            torch.cat([cache, cache.new_zeros(cache[:, :, :1].shape)], dim=2)
            if cache.shape[2]
            else cache.new_zeros((*cache.shape[:2], 1, *cache.shape[3:]))
        )
        rows = rows[:, :, state.slots :].to(cache.dtype)
        index = index.reshape(*index.shape, *[1] * (rows.dim() - 3)).expand(rows.shape)
        return spare.scatter(2, index, rows)[:, :, : state.slots]

    present["salient_key"] = write(state.salient_key, promotion.keys)
    present["salient_value"] = write(state.salient_value, promotion.values)
    if state.salient_score is not None:
        present["salient_score"] = write(state.salient_score, promotion.scores)
    return present
