"""What the rounding of keys and values reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.ops.round_key_value import ROUND_KEY_VALUE
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """Tokens of one call, of one type.

    key, value: [B, T, HK, D].
    """

    key: Tensor
    value: Tensor

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        check(ROUND_KEY_VALUE, self)
