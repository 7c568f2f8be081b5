"""Promotion of chunks that leave the window: salient tokens go to the cache, the others to the linear state."""

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
    """Values that each chunk of a call's query grid reads beyond its window. M = N + k * chunks entries: cache, then new rows.

    keys, values: [B, HS, M, D].
    visible: Entries in the softmax of each query chunk, bool [B, HS, chunks, M].
    slots: Cache slot of each new row, int64 [B, HS, k * chunks]; N = none.
    kv_state: S for each query chunk, [B, H, chunks, F, D]; the last is the state after the call. z_state: [B, H, chunks, F].
    """

    keys: Tensor
    values: Tensor
    visible: Tensor
    slots: Tensor
    kv_state: Tensor
    z_state: Tensor


@dataclass(frozen=True)
class Aligned:
    """A grid's aligned keys and their selection.

    key, value: [B, HK, A, D].
    selected: Offsets of the salient ones, [B, HS, >= chunks, k].
    """

    key: Tensor
    value: Tensor
    selected: Tensor


def promote(
    aligned: Aligned, feature_k_weight: Tensor, config: HybridAttentionConfig, state: HybridAttentionState, grid: Grid
) -> Promotion:
    """Promote every chunk that is due within the call: aligned chunk j for query chunk j.

    Args:
        feature_k_weight: [H, P, D] or [1, P, D].
    """
    chunk, salient, chunks = config.chunk_size, config.salient_per_chunk, grid.chunks
    k, v = aligned.key, aligned.value
    dim, wide, device = k.shape[3], k.dtype, k.device
    begins = grid.number * chunk
    promoted = (begins >= grid.past[:, None]) & (begins < (grid.past + grid.new)[:, None]) & (grid.number >= 2)
    offsets = aligned.selected[:, :, :chunks]
    if state.slots == 0 and config.overflow != "error":
        offsets = offsets[..., :0]  # a cache without slots folds every new row at once
    salient = offsets.shape[3]

    # New rows, [B, HS, k * chunks, ...].
    index = (offsets + (torch.arange(chunks, device=device) * chunk)[:, None]).flatten(2)
    repeat = config.select_heads // config.num_kv_heads

    def rows(x: Tensor) -> Tensor:
        x = x[:, :, : chunks * chunk].repeat_interleave(repeat, dim=1)
        return x.gather(2, index[..., None].expand(-1, -1, -1, dim))

    keys = torch.cat([state.salient_key.to(wide), rows(k)], dim=2)
    values = torch.cat([state.salient_value.to(wide), rows(v)], dim=2)

    past_chunks = (-(-state.length // chunk) - 2).clamp_min(0)  # promoted before the call, [B]
    occupied = torch.arange(state.slots, device=device) < salient * past_chunks[:, None]  # [B, N], saturates at all
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=device).tril()
    fresh = (promoted[:, None] & earlier).repeat_interleave(salient, dim=2)  # [B, query chunk, k * chunks]
    visible = torch.cat([occupied[:, None].expand(-1, chunks, -1), fresh], dim=2)
    row = grid.number - 2  # promoted chunk, [B, chunks]
    taken, folded = promoted, None
    if config.overflow != "error" and salient:
        ring = state.slots // salient
        lane = torch.arange(state.slots, device=device) // salient
        age = lane + (past_chunks[:, None] - 1 - lane) // ring * ring  # the latest chunk written to the slot
        age = torch.cat([age, row.repeat_interleave(salient, dim=1)], dim=1)[:, None]
        first = (past_chunks[:, None] + promoted.cumsum(1) - ring)[
            ..., None
        ]  # the oldest chunk that stays, [B, chunks, 1]
        folded = (visible & (age == first - 1) & promoted[..., None])[:, None].expand(-1, config.select_heads, -1, -1)
        visible &= age >= first
        taken, row = promoted & (row >= first[:, -1]), row % ring
    slot = row[..., None] * salient + torch.arange(salient, device=device)
    slots = torch.where(taken[..., None], slot, state.slots).flatten(1)
    visible, slots = (x[:, None].expand(-1, config.select_heads, *x.shape[1:]) for x in (visible, slots))
    kv_state, z_state = (x[:, :, None].expand(-1, -1, chunks, *x.shape[2:]) for x in (state.kv_state, state.z_state))
    if bool(promoted.any()):  # not in most decode steps
        delta, mass = _linear_part(aligned, offsets, promoted, feature_k_weight, config)
        if folded is not None:
            extra, extra_mass = _folded_part(keys, values, folded, feature_k_weight, config)
            delta, mass = delta + extra, mass + extra_mass
        kv_state, z_state = kv_state + delta.cumsum(2), z_state + mass.cumsum(2)
    return Promotion(keys, values, visible, slots, kv_state, z_state)


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
