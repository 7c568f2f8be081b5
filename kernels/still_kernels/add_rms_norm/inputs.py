"""What a sum and its norm read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.ops.add_rms_norm import ADD_RMS_NORM
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """Tokens of one call, of one type.

    input, residual: [B, T, I], added; a residual of None: 0.
    norm_weight: [I].
    norm_epsilon: Added to the mean square of a token before its root divides the token.
    """

    input: Tensor
    residual: Tensor | None
    norm_weight: Tensor
    norm_epsilon: float = 1e-5

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        check(ADD_RMS_NORM, self)
