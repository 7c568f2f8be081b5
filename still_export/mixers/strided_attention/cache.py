"""What a cache holds of one layer: keys and values of chunks' ends, and the scan's state beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import BesideFixedStates
from still_kernels.attention import AttentionState


class StridedLayer(BesideFixedStates[AttentionState], AttentionLayer):
    """A row for each `row_tokens` tokens.

    Args:
        scan: The other op.
    """

    def __init__(self, scan: Sequence[LayerOp], row_tokens: int, heads: int, dim: int, cache: str | None) -> None:
        super().__init__(scan, heads, dim, cache)
        self.row_tokens = row_tokens

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> AttentionState:
        return super().empty(batch, -(-columns // self.row_tokens), dtype, device)

    def grown(self, state: AttentionState, columns: int) -> AttentionState:
        return super().grown(state, -(-columns // self.row_tokens))
