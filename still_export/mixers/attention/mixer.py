"""Layers of type "full_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.variants import module_for
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.layers import FULL, head_size
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.spec import CACHE, AttributeValue
from still_kernels.hybrid_attention.config import cache_attribute


def attributes(config: Any) -> dict[str, AttributeValue]:
    """The op's, in a model with the STILL family configuration `config`."""
    return {CACHE.name: cache_attribute(config.still.deployment.cache)}


class AttentionMixer(Mixer):
    """Layers of type "full_attention"."""

    name = FULL

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {"H": config.num_attention_heads, "HK": config.num_key_value_heads, "D": head_size(config)}
        return (LayerOp(ATTENTION, attributes(config), sizes),)

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        return AttentionLayer(config.num_key_value_heads, head_size(config), config.still.deployment.cache)

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> None:
        return None

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        module = module_for(base, head_size(config))
        module.cache = config.still.deployment.cache
        return module
