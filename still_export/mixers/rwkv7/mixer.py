"""Layers of type "rwkv7", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import FixedStates, class_for
from still_export.mixers.rwkv7.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.rank_one_attention import RANK_ONE_ATTENTION


class Rwkv7Mixer(Mixer):
    """Layers of type "rwkv7": the family's own `layer_types` say "linear_attention" mixes tokens, "conv" mixes channels."""

    name = "rwkv7"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        shift = LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": config.hidden_size, "P": 1})
        if config.layer_types[index] == "conv":
            return (shift,)
        sizes = {"H": config.num_attention_heads, "D": config.head_dim, "V": config.head_dim}
        return shift, LayerOp(RANK_ONE_ATTENTION, {}, sizes)

    def cache_layer(self, config: Any, index: int) -> FixedStates:
        return FixedStates(self.ops(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return class_for(base, MODULES, "RWKV-7")(base, self.ops(config, index))
