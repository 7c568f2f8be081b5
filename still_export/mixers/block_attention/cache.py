"""What a cache holds of one layer: keys and values, and the sums of keys that blocks are chosen by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from still_export.mixers.attention.cache import AttentionLayer
from still_kernels.attention import AttentionState


@dataclass(frozen=True)
class BlockState(AttentionState):
    """As of attention, and `key_sum` [B, HK, ceil(N / stride), D], in at least float32."""

    key_sum: Tensor | None = None


class BlockLayer(AttentionLayer):
    """The states of one layer; row j of the sums is of the keys from `stride` j on."""

    of = BlockState

    def __init__(self, heads: int, dim: int, stride: int, cache: str | None) -> None:
        super().__init__(heads, dim, cache)
        self.stride = stride

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> Any:
        kept: dict[str, Any] = vars(super().empty(batch, columns, dtype, device))
        wide = torch.promote_types(dtype, torch.float32)
        sums = torch.zeros(batch, self.heads, -(-columns // self.stride), self.dim, dtype=wide, device=device)
        return BlockState(**{**kept, "key_sum": sums})

    def grown(self, state: Any, columns: int) -> Any:
        sums: Tensor = state.key_sum
        kept: Any = super().grown(replace(state, key_sum=None), columns)
        missing = -(-kept.rows // self.stride) - sums.shape[2]
        if kept.rows == state.rows and missing <= 0:
            return state
        return replace(kept, key_sum=torch.nn.functional.pad(sums, (0, 0, 0, max(0, missing))))

    def bind(self, inputs: Any, state: Any) -> None:
        return None
