"""Layers of type "windowed_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.hybrid_attention.window import window_of
from still_export.mixers.layers import WINDOWED
from still_export.mixers.windowed_attention.module import WindowedAttention, window_for
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION


class WindowedAttentionMixer(Mixer):
    """Layers of type "windowed_attention", whose window is the family's `sliding_window`."""

    name = WINDOWED
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        window = window_of(config, config.sliding_window)
        return (LayerOp(HYBRID_ATTENTION, window.attributes(), window.symbols()),)

    def cache_layer(self, config: Any, index: int) -> HybridLayer:
        return HybridLayer(window_of(config, config.sliding_window))

    def module(self, base: nn.Module, config: Any, index: int) -> WindowedAttention:
        return window_for(base)(base, window_of(config, config.sliding_window))
