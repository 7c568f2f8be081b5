"""Layers of type "lightning_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import FixedStates, class_for
from still_export.mixers.lightning_attention.module import MODULES
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class LightningAttentionMixer(Mixer):
    """Layers of type "lightning_attention"; a family's configuration says their `lightning_sizes`: H, D, V and the output's scale."""

    name = "lightning_attention"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim, size, scale = config.lightning_sizes(index)
        attributes = {"update_rule": "gated", "scale": scale}
        return (LayerOp(LINEAR_ATTENTION, attributes, {"H": heads, "D": dim, "V": size}),)

    def cache_layer(self, config: Any, index: int) -> FixedStates:
        return FixedStates(self.ops(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return class_for(base, MODULES, "Lightning attention")(base, self.ops(config, index))
