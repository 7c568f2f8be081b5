"""Hybrid attention of whole sequences from an empty state: the form that training differentiates.

The computation does not depend on values, so torch.compile captures it as one graph and fuses the ops around matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from still_graphs.errors import UnsupportedError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.features import feature_map
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.selection import group_scores, select_tokens, self_saliency


def covers_whole(config: HybridAttentionConfig, tokens: int) -> bool:
    """Whether `whole_hybrid_attention` supports sequences of `tokens` tokens of a layer."""
    return config.local == "chunked" and config.slots_for(tokens) <= config.capacity_slots


def whole_hybrid_attention(inputs: Inputs, config: HybridAttentionConfig) -> Tensor:
    """Hybrid attention of new rows with equal lengths.

    Returns:
        [B, T, H, D], dtype of query; computed in float32, or float64 for float64 inputs.

    Raises:
        ShapeError: A tensor does not fit `config`, or rows differ in length.
        UnsupportedError: The layer has sliding local attention, or T outgrows its cache.

    Source: STILL, arXiv:2602.02180.
    """
    _, tokens = inputs.check(config, whole=True)
    query, gate, dim = inputs.query, inputs.gate, config.head_dim
    if not covers_whole(config, tokens):
        raise UnsupportedError(f"{tokens} tokens of local={config.local!r} with {config.capacity_slots} salient slots.")
    chunk, heads, kv_heads = config.chunk_size, config.num_heads, config.num_kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    chunks = -(-tokens // chunk)
    device = query.device

    def chunked(x: Tensor) -> Tensor:  # [B, T, h, D] -> [B, h, chunks, C, D]
        x = pad(x.to(wide).transpose(1, 2), (0, 0, 0, chunks * chunk - tokens))
        return x.unflatten(2, (chunks, chunk))

    q, k, v = chunked(query), chunked(inputs.key), chunked(inputs.value)
    k_local, v_local = (torch.cat([pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)), x], dim=3) for x in (k, v))

    def by_head(x: Tensor, per_group: Tensor) -> Tensor:  # [B, H, ...] @ [B, h, ...] for h a divisor of H
        return (x.unflatten(1, (per_group.shape[1], -1)) @ per_group[:, :, None]).flatten(1, 2)

    logits = by_head(q, k_local.transpose(-1, -2)) * dim**-0.5  # [B, H, chunks, C, 2C]
    number = torch.arange(chunks, device=device)
    column = torch.arange(2 * chunk, device=device)
    ahead = column - chunk - torch.arange(chunk, device=device)[:, None]  # key minus query position, [C, 2C]
    exists = (number[:, None, None] > 0) | (column >= chunk)
    causal = exists & (ahead <= 0)  # [chunks, C, 2C]
    local = causal
    if config.phantom_first_chunk:
        local = causal | (~exists & (column < chunk))
    logits_local = logits.masked_fill(~local, -torch.inf)
    row_max = logits_local.detach().amax(-1, keepdim=True)
    salient_logits = linear = mass = None
    late = chunks - 2  # chunks that older ones are promoted for
    if late > 0:
        with torch.no_grad():
            scores = self_saliency(
                logits[:, :, :late],
                ahead == 0,
                (column % chunk).expand(chunk, -1),
                (causal & (ahead > -chunk))[:late],
                config,
            )
            selected = select_tokens(group_scores(scores, config), config.salient_per_chunk)  # [B, HS, late, k]
        old_k, old_v = k[:, :, :late], v[:, :, :late]

        def salient(x: Tensor) -> Tensor:  # [B, HK, late, C, D] -> [B, HS, late * k, D]
            x = x.repeat_interleave(config.select_heads // kv_heads, dim=1)
            return x.gather(3, selected[..., None].expand(-1, -1, -1, -1, dim)).flatten(2, 3)

        salient_k, salient_v = salient(old_k), salient(old_v)
        q_late = q[:, :, 2:]
        salient_logits = by_head(q_late.flatten(2, 3), salient_k.transpose(-1, -2)).unflatten(2, (late, chunk))
        older = number[:late].repeat_interleave(config.salient_per_chunk) <= number[:late, None]  # [late, late * k]
        salient_logits = (salient_logits * dim**-0.5).masked_fill(~older[:, None], -torch.inf)
        if config.salient_per_chunk:
            late_max = torch.maximum(row_max[:, :, 2:], salient_logits.detach().amax(-1, keepdim=True))
            row_max = torch.cat([row_max[:, :, :2], late_max], dim=2)

        folded = torch.ones(*selected.shape[:3], chunk, dtype=torch.bool, device=device).scatter(3, selected, False)
        folded = folded.repeat_interleave(heads // config.select_heads, dim=1)
        group = config.group_size
        phi_k = feature_map(old_k.repeat_interleave(group, dim=1), inputs.feature_k_weight, config) * folded[..., None]
        kv_state = (phi_k.transpose(-1, -2) @ old_v.repeat_interleave(group, dim=1)).cumsum(2)
        phi_q = feature_map(q_late, inputs.feature_q_weight, config)
        linear = phi_q @ kv_state
        mass = phi_q @ phi_k.sum(3).cumsum(2)[..., None]

    weight = torch.exp(logits_local - row_max)
    numerator = by_head(weight, v_local)
    denominator = weight.sum(-1, keepdim=True)
    factor = inputs.factor(config, wide)
    if factor is not None:
        factor = factor.to(wide)[:, None, None, None]
        numerator, denominator = factor * numerator, factor * denominator
    if linear is not None and mass is not None and salient_logits is not None:
        salient_weight = torch.exp(salient_logits - row_max[:, :, 2:])
        far = by_head(salient_weight.flatten(2, 3), salient_v).unflatten(2, (late, chunk))
        far_sum = salient_weight.sum(-1, keepdim=True)
        if factor is not None:
            far, far_sum = factor * far, factor * far_sum
        if gate is not None:
            linear = chunked(gate)[:, :, 2:] * linear
        numerator = torch.cat([numerator[:, :, :2], numerator[:, :, 2:] + far + linear], dim=2)
        denominator = torch.cat([denominator[:, :, :2], denominator[:, :, 2:] + far_sum + mass], dim=2)
    mixed = (numerator / (denominator + config.mix_epsilon)).flatten(2, 3)[:, :, :tokens]
    return mixed.transpose(1, 2).to(query.dtype)
