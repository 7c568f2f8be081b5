"""The cache of one softmax attention layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from still_export.mixers.cache_type import narrower
from still_export.mixers.kernel_state import KernelStateLayer
from still_kernels.attention.call import bind_decode
from still_kernels.attention.meaning import AttentionState, Inputs
from still_kernels.hybrid_attention.config import cache_attribute
from still_kernels.launcher import Bound


class AttentionLayer(KernelStateLayer[AttentionState]):
    """Keys and values of one layer; position p of a sequence is in row p."""

    of = AttentionState

    def __init__(self, heads: int, dim: int, cache: str | None = None) -> None:
        super().__init__()
        self.heads, self.dim, self.cache = heads, dim, cache

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> AttentionState:
        stored_dtype = narrower(self.cache, dtype)
        return AttentionState.empty(
            batch, self.heads, self.dim, columns, stored_dtype, device, cache_attribute(self.cache)
        )

    def grown(self, state: AttentionState, columns: int) -> AttentionState:
        missing = columns - state.rows
        if missing <= 0:
            return state
        # Growing by an eighth keeps copies rare in a long decode.
        room = max(missing, state.rows // 8)
        self.owned = True
        padded = {
            name: torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.dim() - 3), 0, room))
            for name, tensor in state.tensors().items()
            if name != "length"
        }
        return replace(state, **padded)

    def bind(self, inputs: Inputs, state: AttentionState) -> Bound | None:
        return bind_decode(inputs, state)
