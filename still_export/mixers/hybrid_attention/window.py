"""Softmax over the latest tokens: hybrid attention without salient tokens and linear terms; its state is a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from still_export.mixers.cache_type import rounded
from still_export.mixers.hybrid_attention.module import HybridOpModule
from still_export.mixers.layers import head_size
from still_kernels.hybrid_attention.config import HybridAttentionConfig


def window_of(config: Any, tokens: int) -> HybridAttentionConfig:
    """The op of a layer with a window of `tokens` tokens, for the STILL family configuration `config`."""
    return HybridAttentionConfig(
        config.num_attention_heads,
        config.num_key_value_heads,
        head_size(config),
        chunk_size=tokens,
        salient_per_chunk=0,
        feature_map="relu",
        feature_dim=1,
        gate="none",
        local="sliding",
        window_size=tokens,
        mix_epsilon=1e-12,  # keeps padding finite
        capacity_tokens=config.still.deployment.capacity(config),
        overflow=config.still.deployment.overflow,
        cache=config.still.deployment.cache,
    )


class WindowModule(HybridOpModule):
    """The projections of the replaced module, and a softmax window."""

    def windowed(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: Any) -> Tensor:
        """Attention [B, T, H, D] of new tokens, after norm and RoPE, to their windows."""
        key, value = rounded(key, self.still.cache), rounded(value, self.still.cache)
        if past_key_values is None:
            return windowed_attention(query, key, value, self.still.window)
        # features of the linear terms, which are absent
        nothing = query.new_zeros(self.still.num_heads, 1, self.head_dim)
        return self.attend((query, key, value, None, nothing, nothing), past_key_values)


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Softmax attention of query [B, T, H, D] to the `window` latest of key and value [B, T, HK, D], including its own: [B, T, H, D]."""
    tokens = query.shape[1]
    window = min(window, tokens)
    count = -(-tokens // window)

    def blocks(x: Tensor) -> Tensor:
        """[B, T, h, D] as [B * blocks, h, window, D]."""
        x = pad(x, (0, 0, 0, 0, 0, count * window - tokens))
        return x.unflatten(1, (count, window)).flatten(0, 1).transpose(1, 2)

    def with_block_before(x: Tensor) -> Tensor:
        own = blocks(x).unflatten(0, (-1, count))
        return torch.cat((pad(own[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), own), dim=3).flatten(0, 1)

    behind = torch.arange(window, device=query.device)[:, None] + window - torch.arange(2 * window, device=query.device)
    seen = (behind >= 0) & (behind < window)  # [window, 2 * window]
    first = seen & (behind <= torch.arange(window, device=query.device)[:, None])
    masks = torch.cat((first[None], seen.expand(count - 1, -1, -1))).repeat(len(query), 1, 1)[:, None]
    out = scaled_dot_product_attention(
        blocks(query),
        with_block_before(key),
        with_block_before(value),
        masks,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2).unflatten(0, (-1, count)).flatten(1, 2)[:, :tokens]
