"""Linearized layers for an engine that serves many requests and owns their states."""

from __future__ import annotations

from torch import Tensor

from still_export.mixers.linear_attention.paged import PagedLinearAttention
from still_export.mixers.linearized.module import LinearizedAttention
from still_export.mixers.paged import PagedTokens, heads_of_rank


class PagedLinearized(PagedLinearAttention):
    """One rank's heads of a layer.

    Args:
        kind: The layer's module, which has the mathematics.
        heads, kv_heads: H, HK of the whole layer.

    Raises:
        UnsupportedModelError: The heads cannot be shared among so many ranks.
    """

    def __init__(self, kind: type[LinearizedAttention], heads: int, kv_heads: int, dim: int, ranks: int) -> None:
        share, _ = heads_of_rank(heads, kv_heads, ranks)
        super().__init__(kind.rule, 0.0, share, 1, dim, kind.per_key)
        self.kind = kind
        self.projections = kind.projections(dim)
        self.head_weights = kind.head_weights(heads, dim)

    def inputs(self, given: PagedTokens) -> dict[str, Tensor]:
        made = self.kind.op_inputs(given.heads, given.projected, given.weights, given.turn)
        return {name: x for name, x in made.items() if x is not None}

    def result(self, output: Tensor, window: Tensor | None, given: PagedTokens) -> Tensor:
        return self.kind.gated(self.kind.normed(output), given.projected, given.weights)
