"""The cache of one layer: keys and values, and the sums of keys, or other values, by which blocks are chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from still_export.mixers.attention.cache import AttentionLayer
from still_kernels.attention.meaning import AttentionState


@dataclass(frozen=True)
class BlockState(AttentionState):
    """The state of attention, and `key_sum` [B, HK, ceil(N / stride), D], in at least float32."""

    key_sum: Tensor | None = None


class RowsLayer(AttentionLayer):
    """The states of one layer: keys, values, and a state named `own_state` with one row for each `stride` tokens.

    Args:
        heads, dim, cache: Of keys and values.
        sizes: Sizes of the own state before and after its rows.
    """

    of: Any
    own_state: ClassVar[str]

    def __init__(self, heads: int, dim: int, cache: str | None, stride: int, sizes: tuple[int, ...]) -> None:
        super().__init__(heads, dim, cache)
        self.stride, self.sizes = stride, sizes

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> Any:
        own: dict[str, Any] = vars(super().empty(batch, columns, dtype, device))
        first, *rest = self.sizes
        wide = torch.promote_types(dtype, torch.float32)
        rows = torch.zeros(batch, first, -(-columns // self.stride), *rest, dtype=wide, device=device)
        return self.of(**{**own, self.own_state: rows})

    def grown(self, state: Any, columns: int) -> Any:
        rows: Tensor = getattr(state, self.own_state)
        own: Any = super().grown(replace(state, **{self.own_state: None}), columns)
        missing = -(-own.rows // self.stride) - rows.shape[2]
        if own.rows == state.rows and missing <= 0:
            return state
        behind = (0, 0) * (rows.dim() - 3)
        return replace(own, **{self.own_state: pad(rows, (*behind, 0, max(0, missing)))})

    def bind(self, inputs: Any, state: Any) -> None:
        return None


class BlockLayer(RowsLayer):
    """Row j of the sums covers the keys from `stride` * j on."""

    of, own_state = BlockState, "key_sum"

    def __init__(self, heads: int, dim: int, stride: int, cache: str | None) -> None:
        super().__init__(heads, dim, cache, stride, (heads, dim))
