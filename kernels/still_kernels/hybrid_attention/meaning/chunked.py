"""The stateful form of hybrid attention in PyTorch, vectorised over chunks: any length, any split, ragged rows.

Each row's new tokens are on a grid of chunks that starts at the row's current chunk c0 = length // C. Keys come from one
aligned buffer per row, from chunk c0-2 (which may still wait for promotion) to the last, gathered from the ring and the new tokens.
A chunk's contribution to S and z is computed once and reaches the queries by a prefix sum over chunks, delayed by two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.features import feature_map
from still_kernels.hybrid_attention.meaning.grid import Grid, gather_rows
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.promotion import Aligned, Promotion, promote
from still_kernels.hybrid_attention.meaning.selection import Watch, group_scores, select_tokens, self_saliency
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState

SEGMENT_TOKENS = 256
"""Tokens of one pass; longer calls are split. It bounds the per-chunk S (4 GiB for 64K tokens of one Llama-8B layer) and the processor
caches' load: 4,097 tokens of a layer of SmolLM2 take 0.70 s on one core, 0.85 with 128, 1.01 with 1,024."""


def chunked_hybrid_attention(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, watch: Watch | None = None
) -> tuple[Tensor, HybridAttentionState]:
    """Hybrid attention of new tokens after those of `state`, which is not changed; `watch` may replace the selection.

    Returns:
        output [B, T, H, D], dtype of query, 0 at padding; and the state after the new tokens.

    Raises:
        ShapeError: A tensor does not fit `config`.
        CapacityError: A row outgrows the salient cache with overflow="error".

    Source: STILL, arXiv:2602.02180.
    """
    batch, tokens = inputs.check(config)
    state.check(config, batch)
    new_tokens = inputs.counts()
    if tuple(new_tokens.shape) != (batch,):
        raise ShapeError(f"new_tokens: expected [{batch}], got {list(new_tokens.shape)}.")
    new_tokens = new_tokens.to(torch.int64)
    if int(new_tokens.min()) < 0 or int(new_tokens.max()) > tokens:
        raise ShapeError(f"new_tokens: expected values in 0..{tokens}, got {new_tokens.tolist()}.")
    _check_capacity(state, new_tokens, config)
    if config.cache == "int8":
        state = state.dequantized(inputs.query.dtype)
    inputs = replace(inputs, window_factor=inputs.factor(config, state.kv_state.dtype))
    outputs = []
    for start in range(0, tokens, SEGMENT_TOKENS):
        part = inputs.part(slice(start, start + SEGMENT_TOKENS))
        present = (new_tokens - start).clamp(0, part.query.shape[1])
        output, state = _segment(replace(part, new_tokens=present), config, state, watch)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state.quantized() if config.cache == "int8" else state


def _check_capacity(state: HybridAttentionState, new_tokens: Tensor, config: HybridAttentionConfig) -> None:
    if config.overflow != "error" or not config.salient_per_chunk:
        return
    longest = int((state.length + new_tokens).max())
    if longest > config.capacity_tokens or config.slots_for(longest) > state.slots:
        raise CapacityError(
            f"a row grows to {longest} tokens; capacity_tokens={config.capacity_tokens} and the state has {state.slots} "
            'salient slots. Raise capacity_tokens, or choose overflow="fold_oldest".'
        )


def _segment(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, watch: Watch | None
) -> tuple[Tensor, HybridAttentionState]:
    """One pass over at most SEGMENT_TOKENS tokens; the call has `new_tokens` and `window_factor`."""
    assert inputs.new_tokens is not None
    wide, chunk = state.kv_state.dtype, config.chunk_size
    grid = Grid.of(chunk, inputs.query.shape[1], state.length, inputs.new_tokens)
    q = grid.queries(inputs.query, wide)
    k = grid.keys(state.window_key, inputs.key, wide)
    v = grid.keys(state.window_value, inputs.value, wide)

    by_kv_head = q.unflatten(1, (config.num_kv_heads, -1)).unflatten(3, (grid.chunks, grid.rows))
    logits = (by_kv_head @ grid.windows(k).transpose(-1, -2)[:, :, None]).flatten(1, 2)
    logits = logits * config.head_dim**-0.5  # [B, H, chunks, R, 2C]
    near = _near(grid)
    scores = grid.scores(state.window_score, _scores(logits, near, grid, config))  # [B, H, A]
    ranked = group_scores(scores, config).unflatten(2, (grid.chunks + 2, chunk))[:, :, : grid.chunks + 1]
    selected = select_tokens(ranked, config.salient_per_chunk)  # [B, HS, chunks + 1, k]
    if watch is not None:
        number = grid.first_chunk[:, None] + torch.arange(-2, grid.chunks - 1, device=k.device)
        whole = ((number + 2) * chunk >= grid.past[:, None]) & ((number + 1) * chunk <= (grid.past + grid.new)[:, None])
        number = number.where(whole, -1)
        keys = k.repeat_interleave(config.select_heads // config.num_kv_heads, dim=1)
        keys = keys.unflatten(2, (grid.chunks + 2, chunk))[:, :, : grid.chunks + 1]
        selected = watch(number, keys, selected)
    promotion = promote(Aligned(k, v, selected), inputs.feature_k_weight, config, state, grid)

    softmax, linear_window = _routed(near, selected, grid, config)
    numerator, denominator = _softmax_part(q, logits.masked_fill(~softmax, -torch.inf), v, promotion, grid)
    if inputs.window_factor is not None:
        factor = inputs.window_factor.to(wide)[:, None, None, None]
        numerator, denominator = factor * numerator, factor * denominator
    phi_q = grid.by_chunk(feature_map(q, inputs.feature_q_weight, config))
    linear, mass = phi_q @ promotion.kv_state, phi_q @ promotion.z_state[..., None]
    if linear_window is not None:
        group = config.group_size
        phi_k = grid.windows(feature_map(k.repeat_interleave(group, dim=1), inputs.feature_k_weight, config))
        similarity = (phi_q @ phi_k.transpose(-1, -2)).masked_fill(~linear_window, 0)
        linear = linear + similarity @ grid.windows(v).repeat_interleave(group, dim=1)
        mass = mass + similarity.sum(-1, keepdim=True)
    if inputs.gate is not None:
        linear = grid.by_chunk(grid.queries(inputs.gate, wide)) * linear
    mixed = (numerator + linear) / (denominator + mass + config.mix_epsilon)
    window = _next_window(state, inputs.key, inputs.value, scores, grid)
    present = HybridAttentionState(**window, **_next_cache(state, promotion), length=state.length + inputs.new_tokens)
    return grid.output(mixed.flatten(2, 3)).to(inputs.query.dtype), present


@dataclass(frozen=True)
class Near:
    """Keys of its window that a query may read.

    ahead: Key position minus query position, [B, R, 2C].
    causal: Keys up to the query's own, bool [B, chunks, R, 2C].
    """

    ahead: Tensor
    causal: Tensor


def _near(grid: Grid) -> Near:
    chunk = grid.chunk_size
    column = torch.arange(2 * chunk, device=grid.past.device)
    ahead = column - chunk - grid.row[..., None]
    filled = grid.windows(grid.filled[:, None])[:, 0, :, None]  # [B, chunks, 1, 2C]
    return Near(ahead, filled & (ahead <= 0)[:, None])


def _scores(logits: Tensor, near: Near, grid: Grid, config: HybridAttentionConfig) -> Tensor:
    """Self-saliency of the new tokens, [B, H, chunks, R]."""
    slot = torch.arange(2 * config.chunk_size, device=logits.device) % config.chunk_size
    last = near.causal & (near.ahead > -config.chunk_size)[:, None]
    own = (near.ahead == 0)[:, None, None]
    scores = self_saliency(logits, own, slot.expand_as(logits), last[:, None], config)  # [B, H, chunks, R]
    return torch.where(grid.by_chunk(grid.in_call[:, None]), scores, 0)


def _routed(near: Near, selected: Tensor, grid: Grid, config: HybridAttentionConfig) -> tuple[Tensor, Tensor | None]:
    """Keys of the window in the softmax and, with sliding attention, those in the linear part, bool [B, H, chunks, R, 2C]."""
    chunk, causal, linear = config.chunk_size, near.causal[:, None], None
    softmax = causal.expand(-1, config.num_heads, -1, -1, -1)
    if config.local == "sliding":
        chosen = selected.new_zeros((*selected.shape[:3], chunk), dtype=torch.bool).scatter_(3, selected, True)
        chosen = torch.nn.functional.pad(chosen[:, :, 1:], (0, chunk))[
            :, :, :, None
        ]  # previous chunks, [B, HS, chunks, 1, 2C]
        chosen = chosen.repeat_interleave(config.num_heads // chosen.shape[1], dim=1)
        softmax = (softmax & (near.ahead > -config.window)[:, None, None]) | (causal & chosen)
        linear = causal & ~softmax
    if config.phantom_first_chunk:
        first = (grid.number == 0)[:, None, :, None, None]
        softmax = softmax | (first & (torch.arange(2 * chunk, device=softmax.device) < chunk))
    return softmax, linear


def _softmax_part(q: Tensor, logits: Tensor, v: Tensor, promotion: Promotion, grid: Grid) -> tuple[Tensor, Tensor]:
    """Weighted values [B, H, chunks, R, D] and weights [..., 1] of cache and window, whose logits are -inf outside of the softmax."""
    seen = promotion.visible.flatten(0, 2).any(0)  # a large cache has many entries that no row reads
    keys, values, visible = promotion.keys[:, :, seen], promotion.values[:, :, seen], promotion.visible[..., seen]
    by_select_head = q.unflatten(1, (keys.shape[1], -1))
    salient = by_select_head @ keys.transpose(-1, -2)[:, :, None] * q.shape[3] ** -0.5
    salient = salient.unflatten(3, (grid.chunks, grid.rows))  # [B, HS, g, chunks, R, entries]
    salient = salient.masked_fill(~visible[:, :, None, :, None], -torch.inf).flatten(1, 2)
    row_max = logits.amax(-1, keepdim=True)
    if salient.shape[-1]:
        row_max = torch.maximum(row_max, salient.amax(-1, keepdim=True))
    row_max = torch.where(row_max.isinf(), 0, row_max).detach()  # padding rows read nothing
    weight, salient_weight = torch.exp(logits - row_max), torch.exp(salient - row_max)
    denominator = weight.sum(-1, keepdim=True) + salient_weight.sum(-1, keepdim=True)
    near = weight.unflatten(1, (v.shape[1], -1)) @ grid.windows(v)[:, :, None]
    far = salient_weight.flatten(2, 3).unflatten(1, (values.shape[1], -1)) @ values[:, :, None]
    return near.flatten(1, 2) + grid.by_chunk(far.flatten(1, 2)), denominator


def _next_window(
    state: HybridAttentionState, key: Tensor, value: Tensor, scores: Tensor, grid: Grid
) -> dict[str, Tensor]:
    """Rings after the new tokens; `scores` [B, H, A] are aligned."""
    slots = state.window_key.shape[2]
    slot = torch.arange(slots, device=key.device)
    last = (grid.past + grid.new - 1)[:, None]
    position = last - (last - slot) % slots  # latest position of each slot, [B, 2C]
    fresh = (position >= grid.past[:, None])[:, None, :]
    step = (position - grid.past[:, None]).clamp(0, grid.tokens - 1)
    place = (position - grid.position[:, :1]).clamp(0, scores.shape[2] - 1)

    def rows(x: Tensor, ring: Tensor) -> Tensor:
        return torch.where(fresh[..., None], gather_rows(x.transpose(1, 2), step).to(ring.dtype), ring)

    return {
        "window_key": rows(key, state.window_key),
        "window_value": rows(value, state.window_value),
        "window_score": torch.where(fresh, gather_rows(scores, place), state.window_score),
    }


def _next_cache(state: HybridAttentionState, promotion: Promotion) -> dict[str, Tensor]:
    """Salient cache, S and z after the call."""
    present = {"kv_state": promotion.kv_state[:, :, -1].clone(), "z_state": promotion.z_state[:, :, -1].clone()}

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
    return present
