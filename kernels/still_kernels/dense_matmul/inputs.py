"""What a product with a dense weight reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.errors import ShapeError
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """Tokens and weight of one call, of one type.

    input: [B, T, I].
    weight: [I, O]; None: `turned_weight` is given.
    turned_weight: The same as [O, I].
    norm_weight: [I], of the norm that tokens pass first; None: they do not.
    residual: [B, T, O], added to the product.
    norm_epsilon: Added to the mean square of a token before its root divides the token.
    """

    input: Tensor
    weight: Tensor | None = None
    turned_weight: Tensor | None = None
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    norm_epsilon: float = 1e-5

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        if (self.weight is None) == (self.turned_weight is None):
            raise ShapeError("weight, turned_weight: one of them is wanted.")
        check(DENSE_MATMUL, self)
