"""What a cache holds of one layer: keys and values, the rule's states, and where chunks went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from still_export.mixers.base import LayerOp
from still_export.mixers.block_attention.cache import RowsLayer
from still_export.mixers.fixed import BesideFixedStates
from still_graphs.ops.routed_attention import ROUTED_CHUNK
from still_kernels.attention import AttentionState


@dataclass(frozen=True)
class RoutedKeys(AttentionState):
    """As of attention, and `chunk_routes` [B, R, ceil(N / 64)], in at least float32."""

    chunk_routes: Tensor | None = None


class RoutedLayer(BesideFixedStates[Any], RowsLayer):
    """Beside them the states that do not grow.

    Args:
        ops: Whose these are.
        routes: R.
    """

    of, kept = RoutedKeys, "chunk_routes"

    def __init__(self, ops: Sequence[LayerOp], heads: int, dim: int, cache: str | None, routes: int) -> None:
        super().__init__(ops, heads, dim, cache, ROUTED_CHUNK, (routes,))
