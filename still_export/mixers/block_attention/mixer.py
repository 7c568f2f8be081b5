"""BlockSelected: attention to chosen blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.errors import UnsupportedModelError
from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.attention.module import SoftmaxAttention
from still_export.mixers.base import LayerOp
from still_export.mixers.block_attention.cache import BlockLayer, BlockState
from still_export.mixers.block_attention.settings import BlockSettings, checked_choice
from still_export.mixers.cache_layer import layer_of
from still_export.mixers.cache_type import rounded
from still_export.mixers.layers import SELECTED, head_size
from still_export.mixers.roles import GATE, PROJECTION
from still_export.mixers.trainable import Trainable, TrainableModule
from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.call import block_attention
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.select_blocks.call import select_blocks
from still_kernels.select_blocks.meaning import Inputs as SelectInputs
from still_kernels.select_blocks.meaning import Watch, naive_select_blocks
from still_kernels.select_blocks.spec import SELECT_BLOCKS


class BlockSelected(SoftmaxAttention):
    """Causal softmax attention to chosen blocks, with the projections and norms of the replaced module.

    Args:
        choice: Attributes of SelectBlocks.
    """

    def __init__(self, base: Any, head_dim: int, choice: Mapping[str, int]) -> None:
        super().__init__(base, head_dim)
        self.choice = dict(choice)
        self.watch: Watch | None = None
        """Called with the choices of a call; may replace them."""
        self.readers: tuple[int, ...] = ()
        """Layers that reuse this layer's blocks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: Any) -> Tensor:
        key, value = rounded(key, self.cache), rounded(value, self.cache)
        layer = layer_of(past_key_values, self.layer_idx, AttentionLayer, "reads chosen blocks")
        if layer is None:
            batch, tokens = query.shape[:2]
            new_tokens = torch.full((batch,), tokens, dtype=torch.int64, device=query.device)
            state = self._layer(key.shape[2]).empty(batch, tokens, query.dtype, query.device)
        else:
            state = layer.take(query.dtype, query.device)
            assert layer.new_tokens is not None
            new_tokens = layer.new_tokens
        with torch.no_grad():  # a choice has no derivative
            blocks, sums = self._choose(query, key, new_tokens, state)
        inputs = Inputs(query, key, value, new_tokens, blocks, self.choice["block_size"])
        past = AttentionState(state.key, state.value, state.length)
        output, present = block_attention(inputs, past, layer is not None and layer.owned)
        if layer is not None:
            layer.store(present if sums is None else BlockState(**{**vars(present), "key_sum": sums}))
        return output

    def _layer(self, heads: int) -> AttentionLayer:
        return BlockLayer(heads, self.head_dim, self.choice["mean_stride"], self.cache)

    def _choose(self, query: Tensor, key: Tensor, new_tokens: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        """Blocks int32 [B, T, HK, slots], and the sums of keys after the call."""
        inputs = SelectInputs(query, key, new_tokens, state.length, **self.choice)
        select = select_blocks if self.watch is None else partial(naive_select_blocks, watch=self.watch)
        blocks, sums = select(inputs, state.key_sum)
        if self.readers:
            self._carried.values[self.layer_idx] = blocks
        return blocks, sums


class ReusedBlocks(BlockSelected):
    """BlockSelected with the blocks that layer `source` chose in the same call; stores no sums of keys.

    Args:
        source: An earlier layer, which chooses its own.
    """

    def __init__(self, base: Any, head_dim: int, choice: Mapping[str, int], source: int) -> None:
        super().__init__(base, head_dim, choice)
        self.source = source
        del self.watch  # nothing is chosen here

    def _layer(self, heads: int) -> AttentionLayer:
        return AttentionLayer(heads, self.head_dim, self.cache)

    def _choose(self, query: Tensor, key: Tensor, new_tokens: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        return self._carried.values[self.source], None


class TrainableBlockSelected(TrainableModule, BlockSelected):
    """BlockSelected as teacher and student."""


class TrainableReusedBlocks(TrainableModule, ReusedBlocks):
    """ReusedBlocks as teacher and student."""


class SalaSparse(BlockSelected):
    """MiniCPM-SALA's BlockSelected, with an output gate."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        "o_gate.weight": GATE,
    }

    def __init__(self, base: Any, head_dim: int, choice: Mapping[str, int]) -> None:
        super().__init__(base, head_dim, choice)
        if hasattr(base, "o_gate"):
            self.o_gate = base.o_gate

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        heads = self.project_heads(hidden, position_embeddings)
        output = self.attend(*heads, past_key_values).flatten(2)
        if hasattr(self, "o_gate"):
            output = output * self.o_gate(hidden).sigmoid()
        return self.o_proj(output)


def choice_of(config: Any) -> dict[str, int]:
    """The attributes of SelectBlocks for the STILL family configuration `config`: the family's or STILL's."""
    choice = (config if hasattr(config, "block_choice") else config.still).block_choice()
    by_call = int(config.still.deployment.whole_prompts)
    return checked_choice({**choice, "switch_by_call": by_call}, "the choice of blocks")


class BlockAttentionMixer(KeysMixer):
    """Layers of type "block_attention", in families that choose blocks from the start."""

    name = "block_attention"
    of_families = by_prompts = True
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
    """Layers of type "selected_blocks", converted from softmax layers without training."""

    name = SELECTED
    settings = tuple(f.name for f in fields(BlockSettings))
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
