"""From op, device and dtype to the kernel that computes it."""

from __future__ import annotations

from torch import Tensor

from still_kernels.hybrid_attention.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.state import HybridAttentionState


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    new_tokens: Tensor,
) -> tuple[Tensor, HybridAttentionState]:
    """Hybrid attention by the fastest kernel that covers the call; arguments as of `chunked_hybrid_attention`."""
    return chunked_hybrid_attention(
        query, key, value, gate, feature_q_weight, feature_k_weight, config, state, new_tokens
    )
