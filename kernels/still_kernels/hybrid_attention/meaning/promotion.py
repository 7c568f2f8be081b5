"""Promotion of chunks that leave the window: salient tokens to the cache, the others to the linear state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.features import feature_map
from still_kernels.hybrid_attention.meaning.grid import Grid
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState


@dataclass(frozen=True)
class Promotion:
    """What each chunk of a call's query grid sees beyond its window. M = N + k * chunks entries: cache, then new rows.

    keys, values: [B, HS, M, D]. scores: [B, HS, M], 0 for cached entries unless the state keeps scores.
    visible: Entries in the softmax of each query chunk, bool [B, HS, chunks, M].
    slots: Cache slot of each new row, int64 [B, HS, k * chunks]; N = none.
    kv_state: S that each query chunk sees, [B, H, chunks, F, D]; the last is the state after the call. z_state: [B, H, chunks, F].
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    visible: Tensor
    slots: Tensor
    kv_state: Tensor
    z_state: Tensor


@dataclass(frozen=True)
class Aligned:
    """A grid's aligned keys, and what is selected of them.

    key, value: [B, HK, A, D].
    ranked: Scores that the selection ranks, [B, HS, >= chunks, C]. selected: Offsets of the salient ones, [B, HS, >= chunks, k].
    """

    key: Tensor
    value: Tensor
    ranked: Tensor
    selected: Tensor


def promote(
    aligned: Aligned, feature_k_weight: Tensor, config: HybridAttentionConfig, state: HybridAttentionState, grid: Grid
) -> Promotion:
    """Promote every chunk whose turn comes within the call: aligned chunk j for query chunk j.

    Args:
        feature_k_weight: [H, P, D] or [1, P, D].
    """
    chunk, salient, chunks = config.chunk_size, config.salient_per_chunk, grid.chunks
    k, v, ranked = aligned.key, aligned.value, aligned.ranked
    dim, wide, device = k.shape[3], k.dtype, k.device
    begins = grid.number * chunk
    promoted = (begins >= grid.past[:, None]) & (begins < (grid.past + grid.new)[:, None]) & (grid.number >= 2)
    offsets = aligned.selected[:, :, :chunks]
    if state.slots == 0 and config.overflow != "error":
        offsets = offsets[..., :0]  # a cache without slots folds every newcomer at once
    salient = offsets.shape[3]

    # New rows, [B, HS, k * chunks, ...].
    index = (offsets + (torch.arange(chunks, device=device) * chunk)[:, None]).flatten(2)
    repeat = config.select_heads // config.num_kv_heads

    def rows(x: Tensor) -> Tensor:
        x = x[:, :, : chunks * chunk].repeat_interleave(repeat, dim=1)
        return x.gather(2, index[..., None].expand(-1, -1, -1, dim))

    keys = torch.cat([state.salient_key.to(wide), rows(k)], dim=2)
    values = torch.cat([state.salient_value.to(wide), rows(v)], dim=2)
    old_scores = torch.zeros_like(keys[:, :, : state.slots, 0]) if state.salient_score is None else state.salient_score
    scores = torch.cat([old_scores, ranked[:, :, :chunks].flatten(2).gather(2, index)], dim=2)

    is_new = promoted[:, None, :, None].expand(-1, config.select_heads, -1, salient)  # [B, HS, chunks, k]
    held_chunks = (-(-state.length // chunk) - 2).clamp_min(0)  # promoted before the call, [B]
    occupied = torch.arange(state.slots, device=device) < salient * held_chunks[:, None]  # [B, N], saturates at all
    occupied = occupied[:, None].expand(-1, config.select_heads, -1)
    folded = None
    if config.overflow == "error" or salient == 0:
        earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=device).tril()
        fresh = (is_new[:, :, None] & earlier[:, :, None]).flatten(3)  # [B, HS, query chunk, k * chunks]
        visible = torch.cat([occupied[:, :, None].expand(-1, -1, chunks, -1), fresh], dim=3)
        rank = torch.arange(salient, device=device)
        slot = ((grid.number - 2)[..., None] * salient + rank)[:, None].expand_as(is_new)
        slots = torch.where(is_new, slot, state.slots).flatten(2)
    else:
        visible, slots, folded = _overflow(scores, occupied, is_new, held_chunks, config)
    kv_state, z_state = (x[:, :, None].expand(-1, -1, chunks, *x.shape[2:]) for x in (state.kv_state, state.z_state))
    if bool(promoted.any()):  # not in most decode steps
        delta, mass = _linear_part(aligned, offsets, promoted, feature_k_weight, config)
        if folded is not None:
            extra, extra_mass = _folded_part(keys, values, folded, feature_k_weight, config)
            delta, mass = delta + extra, mass + extra_mass
        kv_state, z_state = kv_state + delta.cumsum(2), z_state + mass.cumsum(2)
    return Promotion(keys, values, scores, visible, slots, kv_state, z_state)


def _linear_part(
    aligned: Aligned, offsets: Tensor, promoted: Tensor, feature_k_weight: Tensor, config: HybridAttentionConfig
) -> tuple[Tensor, Tensor]:
    """Contribution of each promoted chunk's unselected tokens to S [B, H, chunks, F, D] and z [B, H, chunks, F]."""
    chunks, chunk, group = promoted.shape[1], config.chunk_size, config.group_size
    k, v = (x[:, :, : chunks * chunk].repeat_interleave(group, dim=1) for x in (aligned.key, aligned.value))
    linear = promoted[:, None, :, None].expand(-1, config.select_heads, -1, chunk)
    linear = linear.scatter(3, offsets, False)
    linear = linear.repeat_interleave(config.num_heads // config.select_heads, dim=1)
    phi = feature_map(k, feature_k_weight, config).unflatten(2, (chunks, chunk))
    phi = torch.where(linear[..., None], phi, 0)
    return phi.transpose(-1, -2) @ v.unflatten(2, (chunks, chunk)), phi.sum(3)


def _overflow(
    scores: Tensor, occupied: Tensor, is_new: Tensor, held_chunks: Tensor, config: HybridAttentionConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Let newcomers compete for the N slots, chunk by chunk.

    Args:
        scores: [B, HS, M]. occupied: Cached entries that exist, bool [B, HS, N].
        is_new: Rows promoted within the call, bool [B, HS, chunks, k].
        held_chunks: Chunks promoted before the call, [B].

    Returns:
        visible [B, HS, chunks, M]; slots [B, HS, k * chunks]; folded [B, HS, chunks, M]: entries that leave the softmax
        when each chunk is promoted. Freed slots go to the surviving newcomers in ascending order of both.
    """
    batch, heads, chunks, salient = is_new.shape
    slots_total = occupied.shape[2]
    entries = scores.shape[2]
    device = scores.device
    if config.overflow == "fold_oldest":
        # Age of a slot = the latest chunk that was written there; N is a multiple of k.
        ring = slots_total // salient
        lane = torch.arange(slots_total, device=device) // salient
        age = lane + (held_chunks[:, None] - 1 - lane) // ring * ring
        fresh = held_chunks[:, None, None] + is_new[:, 0].cumsum(1) - 1
        order = torch.cat([age, fresh.flatten(1)], dim=1)[:, None].expand(-1, heads, -1).to(scores.dtype)
    else:
        order = scores
    alive = torch.cat([occupied, torch.zeros_like(is_new).flatten(2)], dim=2)
    slot_of = torch.arange(entries, device=device).clamp_max(slots_total).expand(batch, heads, entries).clone()
    slot_of[..., slots_total:] = slots_total
    visible, folded = [], []
    for j in range(chunks):
        part = slice(slots_total + j * salient, slots_total + (j + 1) * salient)
        alive = alive.clone()
        alive[..., part] = is_new[:, :, j]
        excess = (alive.sum(-1, keepdim=True) - slots_total).clamp_min(0)
        # Lowest first; of equals the later entry goes first.
        ranked = torch.where(alive, order, torch.inf).flip(-1).argsort(dim=-1, stable=True)
        lowest = entries - 1 - ranked
        leaves = torch.zeros_like(alive).scatter_(2, lowest, torch.arange(entries, device=device) < excess)
        leaves &= alive
        alive = alive & ~leaves
        held = torch.zeros(batch, heads, slots_total + 1, dtype=torch.bool, device=device)
        older = alive.clone()
        older[..., part] = False
        held.scatter_(2, torch.where(older, slot_of, slots_total), True)
        free = held[..., :slots_total].to(torch.int8).argsort(dim=-1, stable=True)[..., :salient]
        survivors = alive[..., part]
        turn = (survivors.cumsum(-1) - 1).clamp_min(0)
        slot_of[..., part] = torch.where(survivors, free.gather(2, turn.clamp_max(free.shape[2] - 1)), slots_total)
        visible.append(alive)
        folded.append(leaves)
    slots = torch.where(alive, slot_of, slots_total)[..., slots_total:]
    return torch.stack(visible, dim=2), slots, torch.stack(folded, dim=2)


def _folded_part(
    keys: Tensor, values: Tensor, folded: Tensor, feature_k_weight: Tensor, config: HybridAttentionConfig
) -> tuple[Tensor, Tensor]:
    """Contribution of the entries in `folded` [B, HS, chunks, M] to S and z, per chunk."""
    repeat = config.num_heads // config.select_heads
    leaves = folded.any(2)  # each entry leaves once
    most = int(leaves.sum(-1).max())
    index = leaves.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]  # [B, HS, most]

    def pick(x: Tensor) -> Tensor:
        return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])).repeat_interleave(repeat, dim=1)

    phi = feature_map(pick(keys), feature_k_weight, config)  # [B, H, most, F]
    when = folded.gather(3, index[:, :, None].expand(-1, -1, folded.shape[2], -1)).repeat_interleave(repeat, dim=1)
    phi = torch.where(when[..., None], phi[:, :, None], 0)  # [B, H, chunks, most, F]
    return phi.transpose(-1, -2) @ pick(values)[:, :, None], phi.sum(3)
