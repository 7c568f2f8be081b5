"""What a cache holds of one softmax attention layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from still_export.mixers.base import StillCacheLayer
from still_export.mixers.kept import narrower
from still_kernels.attention import AttentionState


class AttentionLayer(StillCacheLayer):
    """Keys and values of one layer; row b's position p lies in its row p.

    `owned`: nobody else has the tensors, so a call may write into them.
    """

    def __init__(self, heads: int, dim: int, cache: str | None = None) -> None:
        super().__init__()
        self.heads, self.dim, self.cache = heads, dim, cache
        self.state: AttentionState | None = None
        self.owned = True

    def take(self, dtype: torch.dtype, device: torch.device) -> AttentionState:
        """The state to continue from, with room for the tokens of the announced call."""
        assert self.new_tokens is not None and self.length is not None
        if self.state is None:
            batch = self.new_tokens.shape[0]
            kept = narrower(self.cache, dtype)
            self.state = AttentionState.empty(batch, self.heads, self.dim, self.columns, kept, device)
            self.is_initialized = True
        missing = self.columns - self.state.rows
        if self.grows and missing > 0:
            # An eighth more keeps the copies of a long decode rare.
            room = (0, 0, 0, max(missing, self.state.rows // 8))
            key, value = (torch.nn.functional.pad(x, room) for x in (self.state.key, self.state.value))
            self.state, self.owned = AttentionState(key, value, self.state.length), True
        return self.state

    def store(self, state: AttentionState) -> None:
        """Keep the state after the call."""
        self.state, self.length, self.owned = state, state.length, True

    def states(self) -> dict[str, Tensor]:
        assert self.state is not None, "the cache is empty"
        self.owned = False
        return {"key": self.state.key, "value": self.state.value}

    def load(self, states: Mapping[str, Tensor], length: Tensor) -> None:
        super().load(states, length)
        self.state, self.owned = AttentionState(**states, length=length), False

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        if self.state is not None:
            self.state = AttentionState(**{name: change(x) for name, x in self.state.tensors().items()})

    def reset(self) -> None:
        super().reset()
        self.state = None
