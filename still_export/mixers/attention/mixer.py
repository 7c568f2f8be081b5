"""The mixer of layers of type "full_attention"."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.errors import ConfigError
from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.variants import module_for
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.layers import FULL, head_size
from still_export.mixers.projections import ProjectedAttention
from still_graphs.spec import CACHE, AttributeValue
from still_kernels.attention.spec import ATTENTION
from still_kernels.hybrid_attention.config import cache_attribute


def attributes(config: Any) -> dict[str, AttributeValue]:
    """The op's, in a model with the STILL family configuration `config`."""
    return {CACHE.name: cache_attribute(config.still.deployment.cache)}


def sizes(config: Any) -> dict[str, int]:
    """H, HK and D of such a model."""
    return {"H": config.num_attention_heads, "HK": config.num_key_value_heads, "D": head_size(config)}


class KeysMixer(Mixer):
    """Layers that cache keys and values.

    as_numbers: Why these cannot be stored in 8 bits; "": they can.
    """

    as_numbers = ""

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        return AttentionLayer(config.num_key_value_heads, head_size(config), config.still.deployment.cache)

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        cache = config.still.deployment.cache
        if self.as_numbers and cache == "int8":
            raise ConfigError(
                f"--cache int8: layer {index} {self.as_numbers}. Export with --cache float16, or without."
            )
        module = self.made(base, config, index)
        module.cache = cache
        return module

    def made(self, base: nn.Module, config: Any, index: int) -> ProjectedAttention:
        """The module of layer `index`, with the submodules of `base`."""
        raise NotImplementedError


class AttentionMixer(KeysMixer):
    name = FULL

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return (LayerOp(ATTENTION, attributes(config), sizes(config)),)

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> None:
        return None

    def made(self, base: nn.Module, config: Any, index: int) -> ProjectedAttention:
        return module_for(base, head_size(config))
