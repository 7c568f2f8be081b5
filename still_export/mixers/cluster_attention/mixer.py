"""Layers of type "cluster_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.cluster_attention.module import ClusterAttention, ClusterLayer
from still_export.mixers.fixed import class_for
from still_export.mixers.layers import head_size
from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_graphs.ops.cluster_tokens import CLUSTER_TOKENS


class ClusterAttentionMixer(KeysMixer):
    """Layers of type "cluster_attention"; a family's configuration has `window_size`."""

    name = "cluster_attention"
    of_families = True
    as_numbers = "reads chosen tokens, whose keys and values are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        own = sizes(config)
        return (
            LayerOp(CLUSTER_TOKENS, {"cluster_window": config.window_size}, own),
            LayerOp(BLOCK_ATTENTION, {"block_size": 1}, own),
        )

    def cache_layer(self, config: Any, index: int) -> ClusterLayer:
        heads = config.num_attention_heads
        return ClusterLayer(heads, head_size(config), config.still.deployment.cache, 1, (heads,))

    def made(self, base: nn.Module, config: Any, index: int) -> Any:
        kind = class_for(base, {"RoutingMixer": ClusterAttention}, "attention to clusters")
        return kind(base, config.window_size)
