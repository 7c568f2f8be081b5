"""Layers of type "full_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.module import SoftmaxAttention
from still_export.mixers.base import Mixer
from still_export.mixers.config import FULL, head_size
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.spec import AttributeValue


class AttentionMixer(Mixer):
    """Layers of type "full_attention"."""

    name = FULL
    op = ATTENTION

    def attributes(self, config: Any, index: int) -> dict[str, AttributeValue]:
        return {}

    def symbols(self, config: Any, index: int) -> dict[str, int]:
        return {"H": config.num_attention_heads, "HK": config.num_key_value_heads, "D": head_size(config)}

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        return AttentionLayer(config.num_key_value_heads, head_size(config))

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return SoftmaxAttention(base, head_size(config))
