"""The quadratic definition of hybrid attention: every pair of tokens is routed once. Readable, not fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.features import feature_map
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.selection import group_scores, select_tokens, self_saliency


@dataclass(frozen=True)
class Routing:
    """Who attends whom and how; a past token of a query is in exactly one of the three sets.

    local, salient, linear: bool, [B, H, T, T], query by key. scores: [B, H, T].
    """

    local: Tensor
    salient: Tensor
    linear: Tensor
    scores: Tensor


def local_mask(positions: Tensor, config: HybridAttentionConfig) -> Tensor:
    """Pairs (query, key) of the local softmax, [T, T] for `positions` [T]."""
    query, key = positions[:, None], positions[None, :]
    if config.local == "sliding":
        return (key <= query) & (key > query - config.window)
    return (key <= query) & (key // config.chunk_size >= query // config.chunk_size - 1)


def scores_of(query: Tensor, key: Tensor, config: HybridAttentionConfig) -> Tensor:
    """Self-saliency of every token, [B, H, T], from query and key [B, H, T, D] (key repeated per query head)."""
    tokens = query.shape[2]
    position = torch.arange(tokens, device=query.device)
    logits = query @ key.transpose(-1, -2) * config.head_dim**-0.5
    window = (position[None] <= position[:, None]) & (position[None] > position[:, None] - config.chunk_size)
    own = torch.eye(tokens, dtype=torch.bool, device=query.device)
    slot = (position % config.chunk_size).expand(tokens, tokens)
    return self_saliency(logits, own.expand_as(logits), slot.expand_as(logits), window.expand_as(logits), config)


def routing_of(query: Tensor, key: Tensor, config: HybridAttentionConfig) -> Routing:
    """Route every pair of tokens of whole sequences by the definition.

    Args:
        query, key: [B, H, T, D], key repeated per query head.
    """
    batch, heads, tokens, _ = query.shape
    chunk, k, slots = config.chunk_size, config.salient_per_chunk, config.capacity_slots
    scores = scores_of(query, key, config)
    ranked = group_scores(scores, config)  # [B, HS, T]
    position = torch.arange(tokens, device=query.device)
    causal = position[None] <= position[:, None]
    local = local_mask(position, config)
    softmax = torch.zeros(batch, config.select_heads, tokens, tokens, dtype=torch.bool, device=query.device)
    kept = torch.zeros(batch, config.select_heads, tokens, dtype=torch.bool, device=query.device)
    # Chunk c is selected once chunk c + 1 begins (its scores are complete) and enters the cache when chunk c + 2 begins;
    # a sliding window sees the selection one chunk earlier, because its tokens leave the window inside chunk c + 1.
    delay = 2 if config.local == "chunked" else 1
    for current in range(delay, -(-tokens // chunk)):
        promoted = current - delay
        start = promoted * chunk
        offsets = select_tokens(ranked[..., start : start + chunk], k)
        kept.scatter_(2, offsets + start, True)
        visible = kept
        if delay == 2:
            _evict(kept, slots, config)
        else:
            # The newest selection is in the window's ring, not yet in the cache: capacity concerns the older chunks.
            cached = kept.clone()
            cached[..., start:] = False
            _evict(cached, slots, config)
            kept[..., :start] = cached[..., :start]
        rows = slice(current * chunk, min(tokens, (current + 1) * chunk))
        softmax[:, :, rows] = visible[:, :, None]
    softmax = softmax.repeat_interleave(heads // config.select_heads, dim=1)
    local = local.expand(batch, heads, -1, -1)
    salient = softmax & ~local & causal
    return Routing(local, salient, causal & ~local & ~salient, scores)


def _evict(kept: Tensor, slots: int, config: HybridAttentionConfig) -> None:
    """Drop the oldest tokens from `kept` [B, HS, T], in place, until `slots` remain, if the overflow policy folds."""
    excess = int(kept[0, 0].sum()) - slots  # the same for every row and head: k tokens a chunk, less what was dropped
    if excess > 0 and config.overflow == "fold_oldest":
        order = kept.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices  # kept positions, ascending
        kept.scatter_(2, order[..., :excess], False)


def hybrid_definition(inputs: Inputs, config: HybridAttentionConfig) -> Tensor:
    """Hybrid attention over whole sequences [B, T, H, D] by its quadratic definition, in at least float32 (STILL, arXiv:2602.02180)."""
    query, gate = inputs.query, inputs.gate
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.transpose(1, 2).to(wide)
    k, v = (x.transpose(1, 2).repeat_interleave(config.group_size, dim=1).to(wide) for x in (inputs.key, inputs.value))
    routing = routing_of(q, k, config)

    softmax = routing.local | routing.salient
    logits = (q @ k.transpose(-1, -2) * config.head_dim**-0.5).masked_fill(~softmax, -torch.inf)
    row_max = logits.amax(-1, keepdim=True)
    first = min(config.chunk_size, q.shape[2])
    if config.phantom_first_chunk:  # C zero keys before position 0: logits of 0
        row_max[:, :, :first] = row_max[:, :, :first].clamp_min(0)
    weight = torch.exp(logits - row_max)
    denominator = weight.sum(-1, keepdim=True)
    if config.phantom_first_chunk:
        denominator[:, :, :first] += config.chunk_size * torch.exp(-row_max[:, :, :first])
    numerator = weight @ v
    factor = inputs.factor(config, wide)
    if factor is not None:
        factor = factor.to(wide)[:, None, None]
        numerator, denominator = factor * numerator, factor * denominator

    phi_q, phi_k = feature_map(q, inputs.feature_q_weight, config), feature_map(k, inputs.feature_k_weight, config)
    similarity = (phi_q @ phi_k.transpose(-1, -2)).masked_fill(~routing.linear, 0)
    linear = similarity @ v
    if gate is not None:
        linear = gate.transpose(1, 2).to(wide) * linear
    output = (numerator + linear) / (denominator + similarity.sum(-1, keepdim=True) + config.mix_epsilon)
    return output.transpose(1, 2).to(query.dtype)
