"""The cache of a STILL model: tensors only, one row of lengths per layer, right padding that enters nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from still_export.errors import UnsupportedError
from still_export.mixers.config import FULL, StillConfig, head_size
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState


class StillCacheLayer(CacheLayerMixin):
    """What both kinds of layer share: the tokens that each row has seen and brings.

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
            self.length = torch.zeros_like(new_tokens)
        self.grows = columns is not None
        self.columns += columns or 0

    def states(self) -> dict[str, Tensor]:
        """State tensors by name, without the length."""
        raise NotImplementedError

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


class HybridLayer(StillCacheLayer):
    """State of one hybrid attention layer.

    `owned`: nobody else has the state's tensors, so a call may write into them; a copy of the salient cache per token would cost
    more than the step that needs it.
    """

    def __init__(self, config: HybridAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.state: HybridAttentionState | None = None
        self.owned = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(
            "a softmax attention module asked a hybrid layer's cache for all keys; the cache and the model's layer_types "
            "disagree. Create the cache by StillCache.empty(model.config)."
        )

    def take(self, dtype: torch.dtype, device: torch.device) -> HybridAttentionState:
        """The state to continue from, with room for the tokens of the announced call."""
        assert self.new_tokens is not None and self.length is not None
        if self.state is None:
            slots = 0 if self.config.overflow == "error" else self.config.capacity_slots
            batch = self.new_tokens.shape[0]
            self.state = HybridAttentionState.empty(self.config, batch, dtype, device, slots=slots)
            self.is_initialized = True
        if self.grows and self.config.overflow == "error":
            needed = min(self.config.capacity_slots, self.config.slots_for(self.columns))
            if needed > self.state.slots:
                # Doubling keeps the copies of a long decode rare.
                self.state = with_slots(self.state, min(self.config.capacity_slots, max(needed, 2 * self.state.slots)))
        return self.state

    def store(self, state: HybridAttentionState) -> None:
        """Keep the state after the call."""
        self.state, self.length, self.owned = state, state.length, True

    def states(self) -> dict[str, Tensor]:
        assert self.state is not None, "the cache is empty"
        self.owned = False
        return {name: tensor for name, tensor in self.state.tensors().items() if name != "length"}

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        if self.state is not None:
            self.state = HybridAttentionState(**{name: change(x) for name, x in self.state.tensors().items()})

    def reset(self) -> None:
        super().reset()
        self.state = None

    def get_max_length(self) -> int:
        return self.config.capacity_tokens if self.config.overflow == "error" else -1


class FullLayer(StillCacheLayer):
    """Keys and values of one full attention layer, [B, HK, capacity, D]; row b's position p lies in slot p.

    Written by selecting, per slot, the new token that belongs there: standard ops only, and padding is written nowhere,
    even where a padded row would reach beyond the capacity.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.length is None or self.new_tokens is None:
            raise UnsupportedError("the cache was not told the row lengths; run the model's forward, not its layers.")
        if self.keys is None or self.values is None:
            empty = key_states.new_zeros(*key_states.shape[:2], 0, key_states.shape[3])
            self.keys, self.values = empty, empty
            self.is_initialized = True
        if self.grows and self.columns > self.keys.shape[2]:
            room = (0, 0, 0, self.columns - self.keys.shape[2])
            self.keys, self.values = (torch.nn.functional.pad(x, room) for x in (self.keys, self.values))
        slot = torch.arange(self.keys.shape[2], device=key_states.device)
        step = slot - self.length[:, None]  # [B, capacity]
        fresh = ((step >= 0) & (step < self.new_tokens[:, None]))[:, None, :, None]
        index = step.clamp(0, key_states.shape[2] - 1)[:, None, :, None].expand(
            -1, key_states.shape[1], -1, key_states.shape[3]
        )
        self.keys = torch.where(fresh, key_states.gather(2, index), self.keys)
        self.values = torch.where(fresh, value_states.gather(2, index), self.values)
        self.length = self.length + self.new_tokens
        return self.keys, self.values

    def states(self) -> dict[str, Tensor]:
        assert self.keys is not None and self.values is not None, "the cache is empty"
        return {"key": self.keys, "value": self.values}

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None


class StillCache(Cache):
    """The cache of a whole model, for `model(..., past_key_values=cache)` and `generate`."""

    layers: list[StillCacheLayer]  # type: ignore[assignment]

    def __init__(self, layers: Sequence[StillCacheLayer]) -> None:
        super().__init__(layers=list(layers))

    @classmethod
    def empty(cls, config: Any) -> StillCache:
        """A cache that has seen nothing, for a model with the STILL family configuration `config`."""
        still: StillConfig = config.still
        return cls(
            [
                FullLayer() if still.layer_type(i) == FULL else HybridLayer(still.layer_config(config, i))
                for i in range(config.num_hidden_layers)
            ]
        )

    @classmethod
    def from_states(cls, config: Any, states: Sequence[dict[str, Tensor]], past_length: Tensor) -> StillCache:
        """The cache that `states()` described, after `past_length` [B] tokens."""
        cache = cls.empty(config)
        for layer, tensors in zip(cache.layers, states, strict=True):
            layer.length = past_length
            layer.is_initialized = True
            if isinstance(layer, HybridLayer):
                layer.state, layer.owned = HybridAttentionState(**tensors, length=past_length), False
            else:
                layer.keys, layer.values = tensors["key"], tensors["value"]
        return cache

    @property
    def length(self) -> Tensor | None:
        """Tokens that each row has seen, int64 [B]; None before the first call."""
        return self.layers[0].length

    def begin(self, new_tokens: Tensor, columns: int | None) -> None:
        """Announce the next call to every layer; see `StillCacheLayer.begin`."""
        for layer in self.layers:
            layer.begin(new_tokens, columns)

    def states(self) -> list[dict[str, Tensor]]:
        """State tensors of every layer by name."""
        return [layer.states() for layer in self.layers]


def full_layer_shape(config: Any, batch: int, capacity: int) -> tuple[int, int, int, int]:
    """Shape of a full attention layer's `key` and `value` state."""
    return batch, config.num_key_value_heads, capacity, head_size(config)


def empty_states(
    config: Any, batch: int, dtype: torch.dtype, capacity: int | None = None, device: torch.device | str | None = None
) -> list[dict[str, Tensor]]:
    """All-zero states of every layer with room for `capacity` tokens (default: the configured capacity)."""
    still: StillConfig = config.still
    tokens = still.capacity(config) if capacity is None else capacity
    states = []
    for index in range(config.num_hidden_layers):
        if still.layer_type(index) == FULL:
            shape = full_layer_shape(config, batch, tokens)
            states.append({name: torch.zeros(shape, dtype=dtype, device=device) for name in ("key", "value")})
            continue
        layer = still.layer_config(config, index)
        slots = layer.slots_for(tokens) if layer.overflow == "error" else layer.capacity_slots
        tensors = HybridAttentionState.empty(layer, batch, dtype, device, slots=slots).tensors()
        del tensors["length"]
        states.append(tensors)
    return states


def with_slots(state: HybridAttentionState, slots: int) -> HybridAttentionState:
    """`state` with its salient cache padded with empty slots to `slots`."""
    more = slots - state.slots
    pad = torch.nn.functional.pad
    return replace(
        state,
        salient_key=pad(state.salient_key, (0, 0, 0, more)),
        salient_value=pad(state.salient_value, (0, 0, 0, more)),
        salient_score=None if state.salient_score is None else pad(state.salient_score, (0, more)),
    )
