"""What a gate reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.ops.swi_glu import SWI_GLU
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """Numbers of tokens of one call.

    input: [B, T, 2 * width], gate and up side by side.
    width: Numbers of each.
    """

    input: Tensor
    width: int

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        check(SWI_GLU, self, width=self.width)
