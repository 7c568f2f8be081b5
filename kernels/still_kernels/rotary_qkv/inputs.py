"""What a rotation reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.errors import ShapeError
from still_graphs.ops.rotary_qkv import ROTARY_QKV
from still_kernels.sizes import check


@dataclass(frozen=True)
class Inputs:
    """Numbers of tokens and angles of one call, of one type.

    input: [B, T, F], those of query, key, value and gate side by side.
    cos, sin: [B, T, D], both halves of D alike or not.
    query_width, key_width: Multiples of D.
    value_width, gate_width: What is left of F; a gate_width of 0: there is no gate.
    gate_bias: [gate_width]; None: 0.
    gate_input: [B, T, gate_width], which are not among the F then; None: they are.
    """

    input: Tensor
    cos: Tensor
    sin: Tensor
    query_width: int
    key_width: int
    value_width: int
    gate_width: int = 0
    gate_bias: Tensor | None = None
    gate_input: Tensor | None = None

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of the four parts."""
        return self.query_width, self.key_width, self.value_width, self.gate_width

    def check(self) -> None:
        """Raise ShapeError naming what does not fit."""
        own = sum(self.widths if self.gate_input is None else self.widths[:3])
        check(ROTARY_QKV, self, F=own, gate_width=self.gate_width)
        size = self.cos.shape[2]
        if size % 2 or self.query_width % size or self.key_width % size:
            raise ShapeError(
                f"query_width={self.query_width}, key_width={self.key_width}: expected heads of an even size, cos has {size}."
            )
        beside = self.gate_bias is not None or self.gate_input is not None
        if min(self.widths[:3]) < 1 or self.gate_width < 0 or (beside and not self.gate_width):
            raise ShapeError(
                f"widths {list(self.widths)}: expected query, key and value, and a gate for a gate_bias or gate_input."
            )
