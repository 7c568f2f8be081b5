"""Layers of type "local_linear_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.errors import ConfigError
from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import class_for
from still_export.mixers.layers import head_size
from still_export.mixers.local_linear_attention.module import MODULES
from still_graphs.ops.local_linear_attention import LOCAL_LINEAR_ATTENTION


class LocalLinearAttentionMixer(Mixer):
    """Layers of type "local_linear_attention"; a family's configuration has `ridge` and `ridge_steps`, 0 where keys are projected on."""

    name = "local_linear_attention"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {"H": config.num_attention_heads, "HK": config.num_key_value_heads, "D": head_size(config)}
        return (LayerOp(LOCAL_LINEAR_ATTENTION, {"ridge_steps": config.ridge_steps}, sizes),)

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        return AttentionLayer(config.num_key_value_heads, head_size(config), config.still.deployment.cache)

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        if config.still.deployment.cache == "int8":
            raise ConfigError(
                f"cache='int8': layer {index} corrects values by keys, which are kept as numbers; choose float16 or none."
            )
        module = class_for(base, MODULES, "local linear attention")(base, head_size(config))
        module.cache = config.still.deployment.cache
        return module
