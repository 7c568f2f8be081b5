"""Softmax attention: the layers of a mixed model that keep every key and value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from still_export.errors import UnsupportedError
from still_export.mixers.base import StillCacheLayer
from still_export.mixers.config import FULL, head_size
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.spec import AttributeValue


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

    def load(self, states: Mapping[str, Tensor], length: Tensor) -> None:
        super().load(states, length)
        self.keys, self.values = states["key"], states["value"]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None


class AttentionMixer:
    """Layers of type "full_attention"."""

    name = FULL
    op = ATTENTION

    def attributes(self, config: Any, index: int) -> dict[str, AttributeValue]:
        return {}

    def symbols(self, config: Any, index: int) -> dict[str, int]:
        return {"H": config.num_attention_heads, "HK": config.num_key_value_heads, "D": head_size(config)}

    def cache_layer(self, config: Any, index: int) -> FullLayer:
        return FullLayer()

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return base
