"""What the generic rooms ask of a mixer: its ops, the sizes of their states, its cache layer, the module that takes a family's place;
and, for evaluation, its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from still_export.errors import CapacityError, ShapeError, UnsupportedError, UnsupportedModelError
from still_graphs.ops import OpSpec
from still_graphs.spec import AttributeValue
from still_kernels.packing import PagedStates

if TYPE_CHECKING:
    from still_export.mixers.trainable import Trainable

CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""What transformers calls the cache of a model, among its arguments and in its output."""
LayerT = TypeVar("LayerT", bound="StillCacheLayer")


class Progress:
    """How far the sequences of a cache are: one for all its layers.

    `length` and `new_tokens` are int64 [B]: tokens that each sequence has seen and brings; None before the first call. `columns` counts the
    columns of the batch so far, padding included: an upper bound of every length that transformers' bookkeeping and the growth of
    buffers need.
    """

    def __init__(self) -> None:
        self.length: Tensor | None = None
        self.new_tokens: Tensor | None = None
        self.ones: Tensor | None = None
        self.grows = True
        self._columns = 0

    @property
    def columns(self) -> int:
        return self._columns

    def start(self, batch: int, device: torch.device) -> Tensor:
        """Tokens that each of `batch` sequences has seen before the next call, [B]."""
        if self.length is None:
            self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        if batch != self.length.shape[0]:
            raise ShapeError(f"the cache has {len(self.length)} sequences and the call {batch}. Make one for as many.")
        return self.length

    def every(self, tokens: int) -> Tensor:
        """[B] that says that each sequence brings `tokens`; for a decode step nothing new is made."""
        assert self.length is not None
        if tokens != 1:
            return torch.full_like(self.length, tokens)
        if self.ones is None or self.ones.shape != self.length.shape:
            self.ones = torch.ones_like(self.length)
        return self.ones

    def begin(self, new_tokens: Tensor, columns: int | None) -> None:
        """Announce the next call: tokens per sequence, and the columns that it adds; None leaves every buffer as it is."""
        self.new_tokens, self.grows = new_tokens, columns is not None
        self._columns += columns or 0

    def advance(self) -> None:
        """The call is over: its tokens have been seen."""
        assert self.length is not None and self.new_tokens is not None
        self.length = self.length + self.new_tokens  # a new tensor: the old one may have been handed out

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """As of `StillCacheLayer.map_rows`."""
        self.length = None if self.length is None else change(self.length)

    def reset(self) -> None:
        """Nothing has been seen."""
        self.length = self.new_tokens = None
        self._columns = 0


class FixedProgress(Progress):
    """The same in tensors that stay where they are: no step makes one, or counts on the host.

    Args:
        batch: B.
        capacity: Columns that the cache has room for.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.capacity, self.grows = capacity, False
        self.length: Tensor = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ones = torch.ones_like(self.length)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        for tensor in (self.length, self.ones, self.seen):
            stay(tensor)

    @property
    def columns(self) -> int:
        return int(self.seen)

    def begin(self, new_tokens: Tensor, columns: int | None) -> None:
        assert columns is not None
        # A decode step asks nothing of the device; a sequence that grows beyond its room then gets NaN, on the CPU an error.
        if columns > 1 and not torch.compiler.is_compiling() and self.columns + columns > self.capacity:
            raise CapacityError(
                f"the static cache has room for {self.capacity} columns, has seen {self.columns} and is to take {columns} more. "
                "Make a larger one."
            )
        self.new_tokens = new_tokens
        self.seen.add_(columns)

    def advance(self) -> None:
        assert self.new_tokens is not None
        self.length.add_(self.new_tokens)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        refill(self.length, change(self.length))

    def reset(self) -> None:
        self.length.zero_()
        self.seen.zero_()


def stay(tensor: Tensor) -> Tensor:
    """`tensor`, which compiled code may take for one that never moves: a CUDA graph then writes into it and copies nothing."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


def refill(tensor: Tensor, values: Tensor) -> None:
    """Put `values` into a tensor that stays where it is.

    Raises:
        UnsupportedError: There are more or fewer sequences than it has.
    """
    if values.shape != tensor.shape:
        raise UnsupportedError(
            f"a static cache keeps its {len(tensor)} sequences and cannot have {len(values)}. Make it for as many, or leave "
            "cache_implementation unset."
        )
    if values is not tensor:
        tensor.copy_(values)


class StillCacheLayer(CacheLayerMixin):
    """What the cache layers of all mixers share. `progress` is that of the whole cache.

    `fixed`: The tensors have room for all that may come, and stay where they are: calls write into them.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()
        self.fixed = False

    @property
    def length(self) -> Tensor | None:
        return self.progress.length

    @property
    def new_tokens(self) -> Tensor | None:
        return self.progress.new_tokens

    def allocate(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make tensors for `batch` sequences of at most `tokens` tokens, which stay where they are.

        Raises:
            CapacityError: The layer does not take so many.
        """
        raise NotImplementedError

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

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Continue from `states`, which stay the caller's, after `length` tokens."""
        raise NotImplementedError

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor; sequences are the first dimension of each."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.progress.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.progress.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
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


def part_of(cache: Any, index: int, kind: type[LayerT]) -> LayerT | None:
    """What `cache` has for a module of layer `index` that keeps its states in a `kind`; None where it has nothing."""
    layer = cache.layers[index] if isinstance(cache, Cache) else None
    return layer.part(kind) if isinstance(layer, StillCacheLayer) else None


def layer_of(cache: Any, index: int, kind: type[LayerT], what: str) -> LayerT | None:
    """The same for a module that needs it where there is a cache at all.

    Raises:
        UnsupportedError: `cache` is none of a STILL model; layer `index` is, or does, `what`.
    """
    layer = part_of(cache, index, kind)
    if cache is not None and (layer is None or layer.new_tokens is None):
        raise UnsupportedError(
            f"layer {index} {what} and got a {type(cache).__name__}; "
            "pass past_key_values=StillCache.empty(model.config), or none, to the model's forward."
        )
    return layer


@dataclass(frozen=True)
class LayerOp:
    """An op of a layer, with its attributes there.

    symbols: Sizes of the symbols in the shapes of its states, but B and N.
    """

    spec: OpSpec
    attributes: Mapping[str, AttributeValue]
    symbols: Mapping[str, int]


class Pages(Protocol):
    """Pages of one size that hold a layer's states of a request; the request has more of them as it grows."""

    @property
    def size_bytes(self) -> int:
        """From one page to the next."""

    @property
    def columns(self) -> int:
        """Pages of a request at most."""

    def after(self, tokens: int) -> int:
        """Pages of a request of `tokens` tokens."""

    def changing(self, tokens: int) -> Sequence[int]:
        """Columns of those pages of a request of `tokens` tokens that later tokens still write to."""

    def padded(self, size_bytes: int) -> Self:
        """The same in pages of an engine that made them larger."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class PagedProjection:
    """A linear layer of the hidden states beside those of queries, keys and values, for an engine that has parallel ones.

    size: Channels per query head.
    bias: It has one.
    low_rank: Channels between two layers, `<name>.0` without a bias and `<name>.1`; 0: it is one layer.
    """

    size: int
    bias: bool
    low_rank: int = 0


Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries and keys [.., heads, D] to what they are after RoPE, in the type that they have."""


@dataclass(frozen=True)
class PagedTokens:
    """Packed tokens of a call as one rank of a layer gets them.

    heads: Query [tokens, H, D], key and value [tokens, HK, D], after norms and before RoPE.
    projected: By the names of the layer's `projections`, [tokens, H * size].
    weights: This rank's `head_weights`.
    turn: RoPE of query and key.
    """

    heads: tuple[Tensor, Tensor, Tensor]
    projected: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    turn: Turn


class PagedLayer(Protocol):
    """One rank's heads of a layer, over packed tokens of many requests whose states lie in the pages of an engine.

    The engine projects tokens to queries, keys and values, and to what `projections` says. `inputs` and `result` go around the states
    and are compiled with the rest of the model.
    """

    projections: Mapping[str, PagedProjection]
    """By the names of their parameters."""

    head_weights: Mapping[str, tuple[int, ...]]
    """Shapes of further parameters, of all ranks; the first dimension is query heads, or 1 where heads share them."""

    names: tuple[str, ...]
    """Of the tensors that `inputs` makes."""

    linear_states: tuple[torch.dtype, ...] = (torch.float32,)
    """Types that the linear state may be kept in."""

    codes: bool = False
    """Its pages hold keys and values in 8 bits where the model's cache is int8."""

    window: int = 0
    """Tokens, its own among them, that a softmax attention of the engine's own looks at beside; 0: there is none."""

    def inputs(self, given: PagedTokens) -> dict[str, Tensor]:
        """What `attend` takes, each [tokens, ...]."""

    def result(self, output: Tensor, window: Tensor | None, given: PagedTokens) -> Tensor:
        """What goes to the layer's last projection, [tokens, H, D], of the `output` of `attend` and of the engine's own attention."""
        return output

    def refusals(self, dtype: torch.dtype) -> list[str]:
        """Why no kernel covers the layer on CUDA, one line per property with what is covered; empty if one does."""

    def pages(
        self, tokens: int, capacity_tokens: int, dtype: torch.dtype, linear: torch.dtype = torch.float32
    ) -> Pages:
        """How the states of a request of at most `tokens` tokens lie in pages.

        Args:
            capacity_tokens: What the model's states are meant to hold.
            dtype: Of activations.
            linear: Of the linear state, one of `linear_states`.
        """

    def attend(
        self, heads: Mapping[str, Tensor], weights: Mapping[str, Tensor], states: PagedStates, output: Tensor
    ) -> None:
        """Attend and update the states in place.

        Args:
            heads: What `inputs` made.
            weights: This rank's `head_weights`.
            states: The engine's.
            output: [tokens, H, D], written where the sequences have tokens.
        """


def heads_of_rank(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Query heads and key/value heads of each of `ranks`; with more ranks than key/value heads several have the same of these.

    Raises:
        UnsupportedModelError: They cannot be shared so.
    """
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UnsupportedModelError(
            f"{ranks} ranks cannot share num_attention_heads={heads} and num_key_value_heads={kv_heads} evenly. "
            "Choose another --tensor-parallel-size."
        )
    return heads // ranks, max(1, kv_heads // ranks)


class Mixer(Protocol):
    """What one layer does with its tokens and its state; mixers derive from it.

    `config` is a STILL family configuration, `index` a layer of it.
    """

    name: str
    """In `layer_types`."""

    parts: tuple[str, ...] = ()
    """Variants of a model that `without` makes."""

    settings: tuple[str, ...] = ()
    """Fields of the model's STILL configuration that say how its layers are."""

    of_families: bool = False
    """Families have such layers from the start; no softmax layer becomes one."""

    by_prompts: bool = False
    """Its layers can go by a whole prompt's length, `whole_prompts` of the deployment."""

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

    def trainable(self, module: nn.Module, learn_window_factors: bool) -> Trainable | None:
        """The layer's `module`, in place in a form that can be teacher and student; None: the layer stays as it is.

        Args:
            learn_window_factors: Where the softmax terms have a weight, it can be trained.
        """
        return None

    def without(self, model: nn.Module, part: str) -> AbstractContextManager[None]:
        """`model` with a part of these layers switched off, one of `parts`, inside the block."""
        return nullcontext()

    def restore_base(self, model: nn.Module) -> None:
        """Let these layers compute the attention of the base model, for good; nothing to do where they do."""
        return None
