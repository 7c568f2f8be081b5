"""Layers of type "hybrid_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.config import HYBRID
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.hybrid_attention.module import StillAttention
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_graphs.ops.spec import AttributeValue
from still_kernels.hybrid_attention import HybridAttentionConfig


class HybridAttentionMixer:
    """Layers of type "hybrid_attention"."""

    name = HYBRID
    op = HYBRID_ATTENTION

    def attributes(self, config: Any, index: int) -> dict[str, AttributeValue]:
        return self._layer(config, index).attributes()

    def symbols(self, config: Any, index: int) -> dict[str, int]:
        return self._layer(config, index).symbols()

    def cache_layer(self, config: Any, index: int) -> HybridLayer:
        return HybridLayer(self._layer(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> StillAttention:
        still = config.still
        layer = self._layer(config, index)
        return StillAttention(base, layer, config.hidden_size, still.gate_bias, still.shared_feature_map)

    def _layer(self, config: Any, index: int) -> HybridAttentionConfig:
        return config.still.layer_config(config, index)
