"""Layers of type "chosen_width", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.errors import ConfigError
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.chosen_width.module import BLOCK, ChosenWidth
from still_export.mixers.layers import head_size
from still_export.mixers.parallel_mamba2.cache import AttentionAndFixedStates
from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class ChosenWidthMixer(Mixer):
    """Layers of type "chosen_width"; a family's configuration has `sink_size`, `local_window_size` and `pool_size`."""

    name = "chosen_width"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        # What was decided is the state of a linear rule of one number.
        decided = LayerOp(LINEAR_ATTENTION, {"update_rule": "linear", "scale": 1.0}, {"H": 1, "D": 1, "V": 1})
        sizes = {"H": config.num_attention_heads, "HK": config.num_key_value_heads, "D": head_size(config)}
        return decided, LayerOp(BLOCK_ATTENTION, {"block_size": BLOCK}, sizes)

    def cache_layer(self, config: Any, index: int) -> AttentionAndFixedStates:
        decided, _ = self.ops(config, index)
        return AttentionAndFixedStates(
            (decided,), config.num_key_value_heads, head_size(config), config.still.deployment.cache
        )

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        if config.still.deployment.cache == "int8":
            raise ConfigError(
                f"cache='int8': layer {index} reads chosen blocks, whose keys and values are kept as numbers; choose float16 or none."
            )
        module = ChosenWidth(base, head_size(config), self.ops(config, index)[:1], config)
        module.cache = config.still.deployment.cache
        return module
