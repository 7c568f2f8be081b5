"""Liger-GLA for an engine that serves many requests: GLA on states in its pages, the window in the engine's own attention."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from still_export.mixers.base import PagedProjection, PagedTokens
from still_export.mixers.liger_gla.module import op_inputs
from still_export.mixers.linear_attention.paged import PagedLinearAttention


class PagedLigerGLA(PagedLinearAttention):
    """One rank's heads of a layer: `heads` query heads, `kv_heads` states, of `dim` channels."""

    projections: Mapping[str, PagedProjection] = {}
    head_weights: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, heads: int, kv_heads: int, dim: int, window: int) -> None:
        super().__init__("gated", 1.0, kv_heads, heads // kv_heads, dim, per_key=True)
        self.window = window

    def inputs(self, given: PagedTokens) -> dict[str, Tensor]:
        return op_inputs(*given.heads)

    def result(self, output: Tensor, window: Tensor | None, given: PagedTokens) -> Tensor:
        assert window is not None
        return 0.5 * window + 0.5 * output
