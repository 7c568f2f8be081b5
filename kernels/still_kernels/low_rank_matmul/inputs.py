"""What a product with two thin matrices reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.ops.low_rank_matmul import LOW_RANK_MATMUL
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """Tokens of one call and weights, of one type.

    input: [B, T, I].
    inner, outer: [I, R], [R, O].
    base: [B, T, O], added to the product; None: 0.
    """

    input: Tensor
    inner: Tensor
    outer: Tensor
    base: Tensor | None = None

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        check(LOW_RANK_MATMUL, self)
