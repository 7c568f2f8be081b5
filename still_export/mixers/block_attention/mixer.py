"""Layers of type "block_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.errors import UnsupportedModelError
from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.block_attention.cache import BlockLayer
from still_export.mixers.block_attention.module import (
    BlockSelected,
    ReusedBlocks,
    SalaSparse,
    TrainableBlockSelected,
    TrainableReusedBlocks,
)
from still_export.mixers.layers import SELECTED, head_size
from still_export.mixers.trainable import Trainable
from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_graphs.ops.select_blocks import SELECT_BLOCKS


def choice_of(config: Any) -> dict[str, int]:
    """The attributes of SelectBlocks in a model with the STILL family configuration `config`: the family's own, or what it stores."""
    return (config if hasattr(config, "block_choice") else config.still).block_choice()


class BlockAttentionMixer(KeysMixer):
    """Layers of type "block_attention", of families that choose blocks from the start."""

    name = "block_attention"
    of_families = True
    as_numbers = "reads chosen blocks, whose keys and values are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        choice, own = choice_of(config), sizes(config)
        return LayerOp(SELECT_BLOCKS, choice, own), LayerOp(BLOCK_ATTENTION, {"block_size": choice["block_size"]}, own)

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        stride = choice_of(config)["mean_stride"]
        return BlockLayer(config.num_key_value_heads, head_size(config), stride, config.still.deployment.cache)

    def made(self, base: nn.Module, config: Any, index: int) -> BlockSelected:
        kind = SalaSparse if type(base).__name__ == "SalaSparseMixer" else BlockSelected
        return kind(base, head_size(config), choice_of(config))


class SelectedBlocksMixer(BlockAttentionMixer):
    """Layers of type "selected_blocks", which softmax layers become without training."""

    name = SELECTED
    of_families = False

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        found = super().ops(config, index)
        return found if config.still.source_of(index) == index else found[1:]

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        if config.still.source_of(index) == index:
            return super().cache_layer(config, index)
        return KeysMixer.cache_layer(self, config, index)

    def made(self, base: nn.Module, config: Any, index: int) -> BlockSelected:
        source = config.still.source_of(index)
        if source == index:
            module = super().made(base, config, index)
            every = range(config.num_hidden_layers)
            module.readers = tuple(i for i in every if i != index == config.still.source_of(i))
            return module
        return ReusedBlocks(base, head_size(config), choice_of(config), source)

    def trainable(self, module: Any, learn_window_factors: bool) -> Trainable:
        # Wrapping would rename the parameters.
        module.__class__ = TrainableReusedBlocks if isinstance(module, ReusedBlocks) else TrainableBlockSelected
        return module

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> None:
        raise UnsupportedModelError(
            f"layers of type {self.name} are not served by this plugin: it has no kernels that choose blocks. Serve the base model."
        )
