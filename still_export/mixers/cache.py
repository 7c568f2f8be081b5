"""The cache of a STILL model: tensors only, one row of lengths for all layers, right padding that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from still_export.mixers.cache_layer import CACHE, FixedProgress, Progress, StillCacheLayer
from still_export.mixers.cache_type import cache_dtype
from still_export.mixers.registry import mixer_of
from still_graphs.states import State, StateTable

_NAMES = ("cache", "past_key_values", "cache_params")
"""transformers' names of a layer's cache argument, by version and family."""


def hear_cache(module: nn.Module) -> nn.Module:
    """Adapt a module to transformers versions that call all caches "cache"; returns the module."""
    own = next((name for name in _NAMES if name in signature(module.forward).parameters), None)
    if CACHE == "cache" and own not in (None, CACHE):
        module.register_forward_pre_hook(partial(_renamed, own), with_kwargs=True)
    return module


def _renamed(own: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, {own if name == "cache" else name: value for name, value in kwargs.items()}


class StillCache(Cache):
    """The cache of a whole model, for `model(..., past_key_values=cache)` and `generate`."""

    layers: list[StillCacheLayer]  # type: ignore[assignment]

    def __init__(self, layers: Sequence[StillCacheLayer], progress: Progress | None = None) -> None:
        super().__init__(layers=list(layers))
        self.progress = Progress() if progress is None else progress
        for layer in self.layers:
            layer.progress = self.progress

    @classmethod
    def empty(cls, config: Any) -> StillCache:
        return cls(_layers(config))

    @classmethod
    def static(
        cls, config: Any, batch: int, tokens: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> StillCache:
        """A static cache for `batch` sequences of at most `tokens` tokens: tensors are never reallocated, so a decode step compiles to one
        CUDA graph.

        Args:
            dtype: Type of the activations.

        Raises:
            CapacityError: `tokens` exceeds the model's capacity.
        """
        cache = cls(_layers(config), FixedProgress(batch, tokens, device))
        place = torch.empty(0, device=device).device  # with its number
        for layer in cache.layers:
            layer.allocate(batch, tokens, dtype, place)
            layer.fixed = layer.is_compileable = layer.is_initialized = True
        if place.type == "cuda":
            from still_kernels.launcher import spare_counters

            spare_counters(place, 2 * batch * config.num_attention_heads)  # a capture cannot create one
        return cache

    @classmethod
    def from_states(cls, config: Any, states: Sequence[dict[str, Tensor]], past_length: Tensor) -> StillCache:
        """The cache from `states()` after `past_length` [B] tokens."""
        cache = cls.empty(config)
        cache.progress.length = past_length
        for layer, tensors in zip(cache.layers, states, strict=True):
            layer.load(tensors)
            layer.is_initialized = True
        return cache

    @property
    def length(self) -> Tensor | None:
        """Tokens that each sequence has seen, int64 [B]; None before the first call."""
        return self.progress.length

    @property
    def capacity(self) -> int | None:
        """Columns of a static cache; None: it is not static."""
        return self.progress.capacity if isinstance(self.progress, FixedProgress) else None

    def reset(self) -> None:
        self.progress.reset()
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda x: x.index_select(0, indices.to(x.device)))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.progress.map_rows(change)
        for layer in self.layers:
            layer.map_rows(change)

    def states(self) -> list[dict[str, Tensor]]:
        return [layer.states() for layer in self.layers]


def _layers(config: Any) -> list[StillCacheLayer]:
    return [mixer_of(config, i).cache_layer(config, i) for i in range(config.num_hidden_layers)]


def state_table(config: Any, dtype: torch.dtype) -> StateTable:
    """The states of a model with the STILL family configuration `config` and activations of type `dtype`."""
    states: list[State] = []
    rules: dict[Any, Any] = {}
    for index in range(config.num_hidden_layers):
        for op in mixer_of(config, index).ops(config, index):
            for spec in op.spec.states_with(op.attributes):
                growth = None if spec.growth is None else spec.growth.resolve(op.attributes)
                if growth is not None and growth.get("counted"):
                    growth["dimension"] = f"{growth['dimension']}_{index}"  # each layer has rows of its own
                elif growth is not None and growth != rules.setdefault(growth["dimension"], growth):
                    growth["dimension"] = f"{growth['dimension']}_{growth['rows']}"  # a layer with its own k
                shape: list[int | str] = [*spec.sizes({**op.symbols, "B": 0, "N": 0})]
                shape[0] = "batch"
                if growth is not None:
                    shape[int(growth["axis"])] = str(growth["dimension"])
                own = cache_dtype(config, dtype) if spec.narrow else dtype
                kind = str(own).removeprefix("torch.") if spec.dtype == "T" else spec.dtype
                name = f"{spec.name}.{index}"
                states.append(State(name, index, op.spec.name, tuple(shape), kind, spec.in_place, growth))
    return StateTable(states, config.still.deployment.capacity(config), config.still.deployment.bounded)


def empty_states(config: Any, batch: int, dtype: torch.dtype, capacity: int | None = None) -> list[dict[str, Tensor]]:
    """All-zero states of every layer with room for `capacity` tokens (default: the configured capacity).

    States that are always float32 are float64 in a float64 model.
    """
    table = state_table(config, dtype)
    shapes = table.shapes(batch, table.rows(table.capacity_tokens if capacity is None else capacity))
    layers: list[dict[str, Tensor]] = [{} for _ in range(config.num_hidden_layers)]
    for state in table:
        kind = torch.promote_types(dtype, torch.float32) if state.dtype == "float32" else getattr(torch, state.dtype)
        tensor = torch.zeros(shapes[state.name], dtype=kind)
        layers[state.layer][state.name.rsplit(".", 1)[0]] = tensor
    return layers
