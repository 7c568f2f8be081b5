"""Layers of type "liger_gla", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp, Mixer, heads_of_rank
from still_export.mixers.hybrid_attention.window import window_of
from still_export.mixers.layers import head_size
from still_export.mixers.liger_gla.cache import WindowAndFixedStates
from still_export.mixers.liger_gla.module import LigerGLA, TrainableLigerGLA
from still_export.mixers.liger_gla.paged import PagedLigerGLA
from still_export.mixers.trainable import Trainable
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_graphs.ops.linear_attention import LINEAR_ATTENTION

WINDOW = 64
"""Tokens of softmax, as Liger has it."""


class LigerGLAMixer(Mixer):
    """Layers of type "liger_gla"."""

    name = "liger_gla"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        window = window_of(config, WINDOW)
        return LayerOp(HYBRID_ATTENTION, window.attributes(), window.symbols()), *self._beside(config)

    def cache_layer(self, config: Any, index: int) -> WindowAndFixedStates:
        return WindowAndFixedStates(self._beside(config), window_of(config, WINDOW))

    def module(self, base: nn.Module, config: Any, index: int) -> LigerGLA:
        return LigerGLA(base, window_of(config, WINDOW), self._beside(config))

    def trainable(self, module: Any, learn_window_factors: bool) -> Trainable:
        module.__class__ = TrainableLigerGLA  # wrapping would rename the parameters
        return module

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedLigerGLA:
        heads = heads_of_rank(config.num_attention_heads, config.num_key_value_heads, ranks)
        return PagedLigerGLA(*heads, head_size(config), WINDOW)

    def _beside(self, config: Any) -> tuple[LayerOp, ...]:
        dim = head_size(config)
        sizes = {"H": config.num_key_value_heads, "D": dim, "V": dim}
        return (LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes),)
