"""What the choice of a token reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.ops.greedy_token import GREEDY_TOKEN
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """logits: [B, T, V]."""

    logits: Tensor

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        check(GREEDY_TOKEN, self)
