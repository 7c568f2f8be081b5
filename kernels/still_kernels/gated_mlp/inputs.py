"""What a feed-forward layer reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.ops.gated_mlp import GATED_MLP
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """Tokens and weights of one call, of one type.

    input: [B, T, I]; also what the result is added to.
    norm_weight: [I].
    down: [M, I].
    gate_up: [I, 2 * M], the gate's outputs first.
    norm_epsilon: Added to the mean square of a token before its root divides the token.
    """

    input: Tensor
    norm_weight: Tensor
    down: Tensor
    gate_up: Tensor
    norm_epsilon: float = 1e-5

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        check(GATED_MLP, self)
