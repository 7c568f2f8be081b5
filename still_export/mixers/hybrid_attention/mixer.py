"""The mixer of layers of type "hybrid_attention"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.hybrid_attention.modes import make_trainable
from still_export.mixers.hybrid_attention.module import StillAttention
from still_export.mixers.hybrid_attention.paged import PagedHybridAttention
from still_export.mixers.hybrid_attention.settings import HybridSettings
from still_export.mixers.layers import HYBRID
from still_export.mixers.trainable import SOFTMAX, Trainable
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION

CHANGES: dict[str, dict[str, Any]] = {
    "no_salient_tokens": {"salient_per_chunk": 0},
    "no_linear_part": {"feature_map": "relu"},
    "window_only": {"salient_per_chunk": 0, "feature_map": "relu"},
    "no_norm_preserving_map": {"feature_map": "softmax_pm"},
}
PARTS = tuple(CHANGES)
NO_FEATURES = ("no_linear_part", "window_only")
"""Parts that disable linear terms: features become relu of a zero projection."""


@contextlib.contextmanager
def without(model: nn.Module, part: str) -> Iterator[None]:
    """Inside the block `model` has `part` disabled.

    no_salient_tokens: k = 0, all tokens beyond the window are linear. no_linear_part: window and salient tokens only. window_only: only the
    window. no_norm_preserving_map: feature maps do not multiply by the norm of queries and keys.
    """
    modules = [m for m in model.modules() if isinstance(m, StillAttention)]
    before, change = [(m.still, m.feature_q_weight, m.feature_k_weight) for m in modules], CHANGES[part]
    if part == "no_norm_preserving_map" and any(m.still.feature_map != "np_softmax_pm" for m in modules):
        change = {}
    for module in modules:
        module.still = replace(module.still, **change)
        if part in NO_FEATURES:
            module.feature_q_weight = nn.Parameter(torch.zeros_like(module.feature_q_weight))
            module.feature_k_weight = nn.Parameter(torch.zeros_like(module.feature_k_weight))
    config: Any = model.config
    stored = config.still_config
    by_layer = None if "salient_per_chunk" in change else config.still.salient_by_layer
    config.still_config = replace(config.still, **change, salient_by_layer=by_layer).to_dict()  # what caches hold
    try:
        yield
    finally:
        config.still_config = stored
        for module, (still, query, key) in zip(modules, before, strict=True):
            module.still, module.feature_q_weight, module.feature_k_weight = still, query, key


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
