"""Mixers of layers of type "linearized_gla" and "linearized_gdn"."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.layers import head_size
from still_export.mixers.linear_attention.paged import PagedLinearAttention
from still_export.mixers.linearized.fitted import TrainableGatedDeltaNet, TrainableGLA
from still_export.mixers.linearized.module import LinearizedAttention, LinearizedGatedDeltaNet, LinearizedGLA
from still_export.mixers.paged import PagedTokens, heads_of_rank
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class PagedLinearized(PagedLinearAttention):
    """One rank's heads of a layer.

    Args:
        kind: The layer's module class, which defines the computation.
        heads, kv_heads: H, HK of the whole layer.

    Raises:
        UnsupportedModelError: The heads cannot be divided among the ranks.
    """

    def __init__(self, kind: type[LinearizedAttention], heads: int, kv_heads: int, dim: int, ranks: int) -> None:
        share, _ = heads_of_rank(heads, kv_heads, ranks)
        super().__init__(kind.rule, 0.0, share, 1, dim, kind.per_key)
        self.kind = kind
        self.projections = kind.projections(dim)
        self.head_weights = kind.head_weights(heads, dim)

    def inputs(self, packed: PagedTokens) -> dict[str, Tensor]:
        made = self.kind.op_inputs(packed.heads, packed.projected, packed.weights, packed.turn)
        return {name: x for name, x in made.items() if x is not None}

    def result(self, output: Tensor, window: Tensor | None, packed: PagedTokens) -> Tensor:
        return self.kind.gated(self.kind.normed(output), packed.projected, packed.weights)


class LinearizedGLAMixer(FixedStatesMixer):
    name = "linearized_gla"
    of_families = False
    kind: type[LinearizedAttention] = LinearizedGLA
    trained: type | None = TrainableGLA

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        dim = head_size(config)
        sizes = {"H": config.num_attention_heads, "D": dim, "V": dim}
        return (LayerOp(LINEAR_ATTENTION, {"update_rule": self.kind.rule, "scale": 0.0}, sizes),)

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        heads = config.num_attention_heads
        return self.kind(base, head_size(config), heads, config.hidden_size, self.ops(config, index))

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedLinearized:
        return PagedLinearized(
            self.kind, config.num_attention_heads, config.num_key_value_heads, head_size(config), ranks
        )


class LinearizedGatedDeltaNetMixer(LinearizedGLAMixer):
    name = "linearized_gdn"
    kind, trained = LinearizedGatedDeltaNet, TrainableGatedDeltaNet
