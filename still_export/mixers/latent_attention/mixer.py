"""Layers of type "latent_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.mixer import KeysMixer, attributes
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import class_for
from still_export.mixers.latent_attention.module import MODULES, LatentAttention
from still_graphs.ops.attention import ATTENTION


class LatentAttentionMixer(KeysMixer):
    """Layers of type "latent_attention": to the op one head of keys, as wide as the latent and the shared part of the keys."""

    name = "latent_attention"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {"H": config.num_attention_heads, "HK": 1, "D": _width(config)}
        return (LayerOp(ATTENTION, attributes(config), sizes),)

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        return AttentionLayer(1, _width(config), config.still.deployment.cache)

    def made(self, base: nn.Module, config: Any, index: int) -> LatentAttention:
        return class_for(base, MODULES, "latent attention")(base)


def _width(config: Any) -> int:
    return int(config.kv_lora_rank + config.qk_rope_head_dim)
