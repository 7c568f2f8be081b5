"""Layers of type "chosen_width", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.chosen_width.module import BLOCK, ChosenWidth
from still_export.mixers.layers import head_size
from still_export.mixers.parallel_mamba2.cache import AttentionAndFixedStates
from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class ChosenWidthMixer(KeysMixer):
    """Layers of type "chosen_width"; a family's configuration has `sink_size`, `local_window_size` and `pool_size`."""

    name = "chosen_width"
    of_families = True
    as_numbers = "reads chosen blocks, whose keys and values are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        # What was decided is the state of a linear rule of one number.
        decided = LayerOp(LINEAR_ATTENTION, {"update_rule": "linear", "scale": 1.0}, {"H": 1, "D": 1, "V": 1})
        return decided, LayerOp(BLOCK_ATTENTION, {"block_size": BLOCK}, sizes(config))

    def cache_layer(self, config: Any, index: int) -> AttentionAndFixedStates:
        decided, _ = self.ops(config, index)
        return AttentionAndFixedStates(
            (decided,), config.num_key_value_heads, head_size(config), config.still.deployment.cache
        )

    def made(self, base: nn.Module, config: Any, index: int) -> ChosenWidth:
        return ChosenWidth(base, head_size(config), self.ops(config, index)[:1], config)
