"""Self-saliency of tokens and the selection of the salient ones of a chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from still_kernels.hybrid_attention.config import HybridAttentionConfig

RELEASED_EPSILON = 1e-8

Watch = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Receives the numbers [B, n] of a pass's chunks (-1: incomplete, or promoted earlier), their keys [B, HS, n, C, D], and the selected
offsets [B, HS, n, k], ascending. Returns the offsets to use."""


def self_saliency(logits: Tensor, own: Tensor, slot: Tensor, valid: Tensor, config: HybridAttentionConfig) -> Tensor:
    """Score of each token from the logits of its window (the C latest positions).

    Args:
        logits: Logits of each token's window, [..., W]; entries outside `valid` are ignored.
        own: True at the token's own column, [..., W].
        slot: Position modulo C of each column, [..., W]; distinct over the window.
        valid: True where the window has a token, [..., W].
        config: `saliency` chooses margin or the released training code's score.

    Returns:
        [...]; +inf where the token is alone in its window (position 0).

    Source: STILL, arXiv:2602.02180, self-saliency; the margin ranks as both of its KL forms do.
    """
    minus = torch.finfo(logits.dtype).min
    own_logit = torch.where(own, logits, minus).amax(-1)
    others = valid & ~own
    alone = ~others.any(-1)
    if config.saliency == "margin":
        rest = torch.logsumexp(torch.where(others, logits, -torch.inf), dim=-1)
        return torch.where(alone, torch.inf, own_logit - rest)
    return _released_score(logits, others, own, slot, valid, alone, config.chunk_size)


def _released_score(
    logits: Tensor, others: Tensor, own: Tensor, slot: Tensor, valid: Tensor, alone: Tensor, chunk: int
) -> Tensor:
    """Divergence that the released code ranks by, including its constant in slot C-1; slots without a token count once each."""
    eps = RELEASED_EPSILON
    safe = valid | own
    p = torch.where(safe, torch.where(safe, logits, -torch.inf).softmax(-1), 0)
    keep = others | alone[..., None]  # any finite row; replaced by +inf below
    q = torch.where(others, torch.where(keep, logits, -torch.inf).softmax(-1), 0)
    p = (p + eps) / (1 + chunk * eps)
    q = (q + eps) / (1 + chunk * eps + 1 / chunk)
    last = slot == chunk - 1
    q = torch.where(last, 1 / chunk + eps, q)
    score = (p * torch.log(p / (q + eps)) * safe).sum(-1)
    # Columns absent from the window: every slot counts once; those without a token have p and q of an empty slot.
    empty_p = torch.tensor(eps / (1 + chunk * eps), dtype=logits.dtype, device=logits.device)
    empty_q = torch.tensor(eps / (1 + chunk * eps + 1 / chunk), dtype=logits.dtype, device=logits.device)
    has_last = (last & safe).any(-1)
    absent = chunk - safe.sum(-1) - (~has_last).to(torch.int64)
    score = score + absent * (empty_p * torch.log(empty_p / (empty_q + eps)))
    lone_last = empty_p * torch.log(empty_p / (1 / chunk + eps + eps))
    score = score + torch.where(has_last, 0, lone_last)
    return torch.where(alone, torch.inf, score)


def group_scores(scores: Tensor, config: HybridAttentionConfig) -> Tensor:
    """Scores that the selection ranks, one row per head of the salient cache.

    Args:
        scores: [B, H, ...].
        config: `select_scope` chooses the reduction over the query heads of a key/value head.

    Returns:
        [B, HS, ...].
    """
    if config.select_scope == "q_head":
        return scores
    grouped = scores.unflatten(1, (config.num_kv_heads, config.group_size))
    return grouped.amax(2) if config.select_scope == "kv_group_max" else grouped.mean(2)


def select_tokens(scores: Tensor, k: int) -> Tensor:
    """Offsets of the k highest scores of each chunk, ascending; the lower offset wins a tie.

    Args:
        scores: Scores of a whole chunk, [..., C].
        k: Tokens to select, 0 <= k <= C.

    Returns:
        Offsets in the chunk, int64, [..., k].
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(dim=-1).values
