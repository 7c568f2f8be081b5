"""Layers of type "block_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.errors import ConfigError
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.block_attention.cache import BlockLayer
from still_export.mixers.block_attention.module import BlockSelected, SalaSparse
from still_export.mixers.layers import head_size
from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_graphs.ops.select_blocks import SELECT_BLOCKS, fault_of, slots_of


def checked_choice(given: dict[str, int], source: str) -> dict[str, int]:
    """The attributes of SelectBlocks that `given` in `source` and the op's own say.

    Raises:
        ConfigError: They do not fit each other.
    """
    choice = {a.name: int(a.default) for a in SELECT_BLOCKS.attributes} | given
    if choice["block_size"] > 0:
        choice["block_slots"] = slots_of(choice["top_blocks"], choice["dense_length"], choice["block_size"])
    if fault := fault_of(choice):
        raise ConfigError(f"{source}: {fault}. Fix it.")
    return choice


class BlockAttentionMixer(Mixer):
    """Layers of type "block_attention"; a configuration says by `block_choice` how blocks are chosen."""

    name = "block_attention"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {"H": config.num_attention_heads, "HK": config.num_key_value_heads, "D": head_size(config)}
        choice = config.block_choice()
        return LayerOp(SELECT_BLOCKS, choice, sizes), LayerOp(
            BLOCK_ATTENTION, {"block_size": choice["block_size"]}, sizes
        )

    def cache_layer(self, config: Any, index: int) -> BlockLayer:
        stride = config.block_choice()["mean_stride"]
        return BlockLayer(config.num_key_value_heads, head_size(config), stride, config.still.deployment.cache)

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        if config.still.deployment.cache == "int8":
            raise ConfigError(
                f"cache='int8': layer {index} reads chosen blocks, whose keys and values are kept as numbers; choose float16 or none."
            )
        kind = SalaSparse if type(base).__name__ == "SalaSparseMixer" else BlockSelected
        module = kind(base, head_size(config), config.block_choice())
        module.cache = config.still.deployment.cache
        return module
