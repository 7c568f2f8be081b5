"""Layers of type "hybrid_attention", for the generic rooms."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.hybrid_attention.modes import make_trainable
from still_export.mixers.hybrid_attention.module import StillAttention
from still_export.mixers.hybrid_attention.paged import PagedHybridAttention
from still_export.mixers.hybrid_attention.parts import PARTS, without
from still_export.mixers.hybrid_attention.settings import HybridSettings
from still_export.mixers.layers import HYBRID
from still_export.mixers.trainable import SOFTMAX, Trainable
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION


class HybridAttentionMixer(Mixer):
    name = HYBRID
    settings = tuple(f.name for f in fields(HybridSettings))
    parts = PARTS

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        layer = self._layer(config, index)
        return (LayerOp(HYBRID_ATTENTION, layer.attributes(), layer.symbols()),)

    def cache_layer(self, config: Any, index: int) -> HybridLayer:
        return HybridLayer(self._layer(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> StillAttention:
        still = config.still
        layer = self._layer(config, index)
        module = StillAttention(base, layer, config.hidden_size, still.gate_bias, still.shared_feature_map)
        module.cache = still.deployment.cache
        return module

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedHybridAttention:
        still = config.still
        return PagedHybridAttention(self._layer(config, index), still.gate_bias, still.shared_feature_map, ranks, rank)

    def trainable(self, module: nn.Module, learn_window_factors: bool) -> Trainable:
        return make_trainable(module, learn_window_factors)[0]

    def without(self, model: nn.Module, part: str) -> AbstractContextManager[None]:
        return without(model, part)

    def restore_base(self, model: nn.Module) -> None:
        for attention in make_trainable(model):
            attention.mode = SOFTMAX

    def _layer(self, config: Any, index: int) -> HybridAttentionConfig:
        return config.still.layer_config(config, index, config.still.deployment)
