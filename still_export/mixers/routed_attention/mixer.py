"""Layers of type "routed_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import class_for
from still_export.mixers.layers import head_size
from still_export.mixers.routed_attention.cache import RoutedLayer
from still_export.mixers.routed_attention.module import NatsAttention
from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION
from still_graphs.ops.routed_attention import ROUTED_ATTENTION, ROUTED_CHUNK


class RoutedAttentionMixer(KeysMixer):
    """Layers of type "routed_attention"; a family's configuration has `routes` and `keep_decay`."""

    name = "routed_attention"
    of_families = True
    as_numbers = "reads chosen chunks, whose keys and values are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim, size = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        rule = {"H": heads, "D": dim, "V": size, "R": config.routes}
        channels = {"C": heads * (2 * dim + size), "P": config.linear_conv_kernel_dim - 1}
        # What an open chunk is told so far is the state of a gated rule of one number for each route.
        told = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": config.routes, "D": 1, "V": 1})
        return (
            LayerOp(CAUSAL_CONV, {"activation": "silu"}, channels),
            told,
            LayerOp(ROUTED_ATTENTION, {"keep_decay": int(config.keep_decay)}, rule),
            LayerOp(BLOCK_ATTENTION, {"block_size": ROUTED_CHUNK}, sizes(config)),
        )

    def cache_layer(self, config: Any, index: int) -> RoutedLayer:
        kept = config.num_attention_heads, head_size(config), config.still.deployment.cache
        return RoutedLayer(self.ops(config, index)[:3], *kept, config.routes)

    def made(self, base: nn.Module, config: Any, index: int) -> Any:
        kind = class_for(base, {"FlaRouted": NatsAttention}, "routed attention")
        return kind(base, self.ops(config, index)[:3], config)
