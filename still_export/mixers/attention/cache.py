"""What a cache holds of one softmax attention layer."""

from __future__ import annotations

import torch

from still_export.mixers.kept import narrower
from still_export.mixers.kernel_state import KernelStateLayer
from still_kernels.attention import AttentionState, Inputs
from still_kernels.attention.dispatch import bind_decode
from still_kernels.launcher import Bound


class AttentionLayer(KernelStateLayer[AttentionState]):
    """Keys and values of one layer; row b's position p lies in its row p."""

    of = AttentionState

    def __init__(self, heads: int, dim: int, cache: str | None = None) -> None:
        super().__init__()
        self.heads, self.dim, self.cache = heads, dim, cache

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> AttentionState:
        kept = narrower(self.cache, dtype)
        return AttentionState.empty(batch, self.heads, self.dim, columns, kept, device)

    def grown(self, state: AttentionState, columns: int) -> AttentionState:
        missing = columns - state.rows
        if missing <= 0:
            return state
        # An eighth more keeps the copies of a long decode rare.
        room = (0, 0, 0, max(missing, state.rows // 8))
        self.owned = True
        key, value = (torch.nn.functional.pad(x, room) for x in (state.key, state.value))
        return AttentionState(key, value, state.length)

    def bind(self, inputs: Inputs, state: AttentionState) -> Bound | None:
        return bind_decode(inputs, state)
