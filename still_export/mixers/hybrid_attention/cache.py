"""What a cache holds of one hybrid attention layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from still_export.mixers.base import StillCacheLayer
from still_export.mixers.kept import narrower
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState


class HybridLayer(StillCacheLayer):
    """State of one hybrid attention layer.

    `owned`: nobody else has the state's tensors, so a call may write into them; a copy of the salient cache per token would cost
    more than the step that needs it.
    """

    def __init__(self, config: HybridAttentionConfig, cache: str | None = None) -> None:
        super().__init__()
        self.config, self.cache = config, cache
        self.state: HybridAttentionState | None = None
        self.owned = True

    def take(self, dtype: torch.dtype, device: torch.device) -> HybridAttentionState:
        """The state to continue from, with room for the tokens of the announced call."""
        assert self.new_tokens is not None and self.length is not None
        if self.state is None:
            slots = 0 if self.config.overflow == "error" else self.config.capacity_slots
            batch = self.new_tokens.shape[0]
            kept = narrower(self.cache, dtype)
            self.state = HybridAttentionState.empty(self.config, batch, dtype, device, slots=slots, kept=kept)
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

    def load(self, states: Mapping[str, Tensor], length: Tensor) -> None:
        super().load(states, length)
        self.state, self.owned = HybridAttentionState(**states, length=length), False

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        if self.state is not None:
            self.state = HybridAttentionState(**{name: change(x) for name, x in self.state.tensors().items()})

    def reset(self) -> None:
        super().reset()
        self.state = None

    def get_max_length(self) -> int:
        return self.config.capacity_tokens if self.config.overflow == "error" else -1


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
