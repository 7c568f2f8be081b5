"""Layers over other ops than still::Attention whose states are keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.cache_layer import layer_of
from still_export.mixers.cache_type import rounded
from still_export.mixers.projections import ProjectedAttention
from still_kernels.attention.meaning import Compute, Of


class Keyed(nn.Module):
    """A module around such an op."""

    layer_idx: int
    cache: str | None = None
    """Type of cached keys and values; None: the activations'."""

    def layer(self, key: Tensor) -> AttentionLayer:
        """A cache layer for keys [B, T, HK, D]."""
        return AttentionLayer(key.shape[2], key.shape[3], self.cache)

    def attended(
        self, attend: Compute[Of], kind: type[Of], heads: tuple[Tensor, Tensor, Tensor], cache: Any, **more: Any
    ) -> Tensor:
        """The output of `attend` on a `kind` of inputs made of query, key, value and `more`; `cache` is updated."""
        query, key, value = heads[0], *(rounded(x, self.cache) for x in heads[1:])
        layer = layer_of(cache, self.layer_idx, AttentionLayer, "keeps keys")
        if layer is None:
            batch, tokens = query.shape[:2]
            counts = torch.full((batch,), tokens, dtype=torch.int64, device=query.device)
            state = self.layer(key).empty(batch, tokens, query.dtype, query.device)
        else:
            state = layer.take(query.dtype, query.device)
            assert layer.new_tokens is not None
            counts = layer.new_tokens
        inputs = kind(query, key, value, counts, **more)
        output, present = attend(inputs, state, layer is not None and layer.owned)
        if layer is not None:
            layer.store(present)
        return output


class KeyedAttention(Keyed, ProjectedAttention):
    """Such a module with the projections of a family's module."""
