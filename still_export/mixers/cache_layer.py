"""A layer of a cache: progress of its sequences, and its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from still_export.errors import CapacityError, ShapeError, UnsupportedError

CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""transformers' name of a model's cache, as an argument and an output."""
LayerT = TypeVar("LayerT", bound="StillCacheLayer")


class Progress:
    """Progress of a cache's sequences, shared by all layers.

    `length` and `new_tokens`, int64 [B]: number of earlier and of new tokens of each sequence; None before the first call. `columns`:
    number of columns of the batch so far, including padding. It bounds every length, for transformers' bookkeeping and the growth of
    buffers.
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
        """`tokens` for each sequence, [B]; a decode step allocates nothing."""
        assert self.length is not None
        if tokens != 1:
            return torch.full_like(self.length, tokens)
        if self.ones is None or self.ones.shape != self.length.shape:
            self.ones = torch.ones_like(self.length)
        return self.ones

    def begin(self, new_tokens: Tensor, columns: int | None) -> None:
        """Announce the next call: new tokens per sequence, and the columns that it adds (None: buffers are not grown)."""
        self.new_tokens, self.grows = new_tokens, columns is not None
        self._columns += columns or 0

    def advance(self) -> None:
        """Finish the call: its tokens are seen."""
        assert self.length is not None and self.new_tokens is not None
        self.length = self.length + self.new_tokens  # a new tensor, because the old one may be in use

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.length = None if self.length is None else change(self.length)

    def reset(self) -> None:
        self.length = self.new_tokens = None
        self._columns = 0


class FixedProgress(Progress):
    """Progress in fixed tensors: a step allocates nothing and does not synchronize.

    Args:
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
        # A decode step reads nothing from the device; a sequence beyond its room gets NaN, and an error on the CPU.
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
    """Mark `tensor` as never moving for compiled code: CUDA graphs write into it without copies."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


def refill(tensor: Tensor, values: Tensor) -> None:
    """Copy `values` into a fixed tensor.

    Raises:
        UnsupportedError: The number of sequences differs.
    """
    if values.shape != tensor.shape:
        raise UnsupportedError(
            f"a static cache keeps its {len(tensor)} sequences and cannot have {len(values)}. Make it for as many, or leave "
            "cache_implementation unset."
        )
    if values is not tensor:
        tensor.copy_(values)


class StillCacheLayer(CacheLayerMixin):
    """Shared by the cache layers of all mixers; `progress` is the whole cache's.

    `fixed`: The tensors have room for all calls and keep their addresses: calls write into them.
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
        """Allocate fixed tensors for `batch` sequences of at most `tokens` tokens.

        Raises:
            CapacityError: `tokens` exceeds the layer's capacity.
        """
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(
            "a family's own attention module asked a STILL cache for all keys; the cache and the model's layer_types disagree. "
            "Create the cache by StillCache.empty(model.config)."
        )

    def part(self, kind: type[LayerT]) -> LayerT | None:
        """The cache layer of class `kind` here: this one, or one that it contains."""
        return self if isinstance(self, kind) else None

    def states(self) -> dict[str, Tensor]:
        """State tensors by name, without the length."""
        raise NotImplementedError

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Continue from `states` (not modified) after `length` tokens."""
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
    """The cache layer of class `kind` for layer `index` in `cache`; None: there is none."""
    layer = cache.layers[index] if isinstance(cache, Cache) else None
    return layer.part(kind) if isinstance(layer, StillCacheLayer) else None


def layer_of(cache: Any, index: int, kind: type[LayerT], what: str) -> LayerT | None:
    """Like `part_of`, for a module that requires it if there is a cache.

    Raises:
        UnsupportedError: `cache` is not a STILL model's; `what` describes layer `index` in the message.
    """
    layer = part_of(cache, index, kind)
    if cache is not None and (layer is None or layer.new_tokens is None):
        raise UnsupportedError(
            f"layer {index} {what} and got a {type(cache).__name__}; "
            "pass past_key_values=StillCache.empty(model.config), or none, to the model's forward."
        )
    return layer
