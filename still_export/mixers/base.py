"""What the generic rooms ask of a mixer: its ops, the sizes of their states, its cache layer, the module that takes a family's place;
and, for evaluation, its parts and its audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from still_export.errors import UnsupportedError, UnsupportedModelError
from still_graphs.ops import OpSpec
from still_graphs.ops.spec import AttributeValue
from still_kernels.packing import Packing

LayerT = TypeVar("LayerT", bound="StillCacheLayer")


class StillCacheLayer(CacheLayerMixin):
    """What the cache layers of all mixers share: the tokens that each row has seen and brings.

    `length` and `new_tokens` are int64 [B]. `columns` counts the columns of the batch so far, padding included: an upper bound of
    every length that is known without reading a tensor, which transformers' bookkeeping and the growth of buffers need.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.length: Tensor | None = None
        self.new_tokens: Tensor | None = None
        self.columns = 0
        self.grows = True

    def begin(self, new_tokens: Tensor, columns: int | None) -> None:
        """Announce the next call: tokens per row, and the columns that it adds; None leaves every buffer as it is."""
        self.new_tokens = new_tokens
        if self.length is None:
            self.length = new_tokens.new_zeros(new_tokens.shape)
        self.grows = columns is not None
        self.columns += columns or 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(
            "a family's own attention module asked a STILL cache for all keys; the cache and the model's layer_types disagree. "
            "Create the cache by StillCache.empty(model.config)."
        )

    def part(self, kind: type[LayerT]) -> LayerT | None:
        """What a module that keeps its states in a `kind` finds here: this layer itself, or one that it holds."""
        return self if isinstance(self, kind) else None

    def states(self) -> dict[str, Tensor]:
        """State tensors by name, without the length."""
        raise NotImplementedError

    def load(self, states: Mapping[str, Tensor], length: Tensor) -> None:
        """Continue from `states`, which stay the caller's, after `length` [B] tokens."""
        self.length = length
        self.is_initialized = True

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor; rows are the first dimension of each."""
        if self.length is not None:
            self.length = change(self.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = self.new_tokens = None
        self.columns = 0
        self.is_initialized = False

    def offload(self) -> None:
        raise UnsupportedError(
            "offloading a STILL cache is not supported; it is small: leave cache_implementation unset."
        )

    def prefetch(self) -> None:
        raise UnsupportedError(
            "offloading a STILL cache is not supported; it is small: leave cache_implementation unset."
        )

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedError(
            f"cannot remove {tokens_to_remove} tokens from a STILL cache: promoted chunks live on in S and z. "
            "Start from a new cache; assisted and speculative decoding are not supported."
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map_rows(lambda x: x.index_select(0, indices.to(x.device)))


def part_of(cache: Any, index: int, kind: type[LayerT]) -> LayerT | None:
    """What `cache` has for a module of layer `index` that keeps its states in a `kind`, told of the call; None where it has nothing."""
    layer = cache.layers[index] if isinstance(cache, Cache) else None
    found = layer.part(kind) if isinstance(layer, StillCacheLayer) else None
    return None if found is None or found.new_tokens is None else found


Profile = Mapping[str, Mapping[str, Sequence[float]]]
"""Panel -> line -> value of each layer."""


class Audit(Protocol):
    """Results of an audit of a mixer's layers."""

    @property
    def passed(self) -> bool:
        """Whether everything that must hold holds."""

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""

    def lines(self) -> list[str]:
        """What a reader sees first."""

    def profiles(self) -> Mapping[str, Profile]:
        """Lines over layers to be plotted, by name."""

    def shares(self) -> Mapping[str, np.ndarray]:
        """Choices counted by layer and place, [layers, places], to be plotted, by name."""


@dataclass(frozen=True)
class LayerOp:
    """An op of a layer, with its attributes there.

    symbols: Sizes of the symbols in the shapes of its states, but B and N.
    """

    spec: OpSpec
    attributes: Mapping[str, AttributeValue]
    symbols: Mapping[str, int]


class PagedLayer(Protocol):
    """One rank's heads of a layer, over packed tokens of many requests whose states an engine owns, a page each.

    The engine projects tokens to queries, keys and values, and to a gate where the layer has one.
    """

    op: LayerOp
    """With the sizes of this rank."""

    gate_bias: bool | None
    """Whether the gate's projection has a bias; None: there is no gate."""

    head_weights: Mapping[str, tuple[int, ...]]
    """Shapes of further parameters, of all ranks; the first dimension is query heads, or 1 where heads share them."""

    def refusals(self, dtype: torch.dtype) -> list[str]:
        """Why no kernel covers the layer on CUDA, one line per property with what is covered; empty if one does."""

    def attend(
        self,
        heads: Mapping[str, Tensor | None],
        weights: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        length: Tensor,
        packing: Packing,
        output: Tensor,
    ) -> None:
        """Attend and update the states in place; a row of length 0 starts empty, whatever its page holds.

        Args:
            heads: query [tokens, H, D] and key [tokens, HK, D] after norm and RoPE, value, gate after its sigmoid or None.
            weights: This rank's `head_weights`.
            states: Tensors [pages, ...] by the op's names.
            length: Tokens that each of the packed rows has seen, [B].
            output: [tokens, H, D], written where the rows have tokens.
        """


class Mixer(Protocol):
    """What one layer does with its tokens and its state; mixers derive from it.

    `config` is a STILL family configuration, `index` a layer of it.
    """

    name: str
    """In `layer_types`."""

    parts: tuple[str, ...] = ()
    """Variants of a model that `without` makes."""

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        """The ops of the layer; the names of their states differ."""

    def cache_layer(self, config: Any, index: int) -> StillCacheLayer:
        """The layer's part of a cache that has seen nothing."""

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        """The module that takes the place of the family's module `base`, which mixes the tokens of the layer.

        Raises:
            UnsupportedModelError: `base` is of a family, or a variant, that the mixer does not cover.
        """

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedLayer | None:
        """The layer for an engine that serves many requests, one of `ranks` that share its heads; None: the engine's own softmax
        attention computes it.

        Raises:
            UnsupportedModelError: It is not served so, or its heads cannot be shared so.
        """
        raise UnsupportedModelError(
            f"layers of type {self.name} are not served by this plugin: vLLM has the family itself. Serve the model that was exported."
        )

    def without(self, model: nn.Module, part: str) -> AbstractContextManager[None]:
        """`model` with a part of these layers switched off, one of `parts`, inside the block."""
        return nullcontext()

    def restore_base(self, model: nn.Module) -> None:
        """Let these layers compute the attention of the base model, for good; nothing to do where they do."""
        return None

    def audit(self, model: Any, tokenizer: Any, ids: Tensor) -> Audit | None:
        """Audit these layers of `model` on token ids [T]; None where there is nothing that must hold.

        Raises:
            ConfigError: The text is too short.
        """
        return None
