"""Layers of type "mean_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import FixedStates, class_for
from still_export.mixers.mean_attention.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class MeanAttentionMixer(Mixer):
    """Layers of type "mean_attention"."""

    name = "mean_attention"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        sizes = {"H": heads, "D": config.key_size, "V": size + 1}
        rule = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes)
        if not config.kernel_size:
            return (rule,)
        taps = {"C": config.hidden_size, "P": config.kernel_size - 1}
        return LayerOp(CAUSAL_CONV, {"activation": "none"}, taps), rule

    def cache_layer(self, config: Any, index: int) -> FixedStates:
        return FixedStates(self.ops(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return class_for(base, MODULES, "mean attention")(base, self.ops(config, index))
