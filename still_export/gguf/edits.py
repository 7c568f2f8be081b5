"""Undo what llama.cpp's converter did to tensors: permuted rows and columns, changed values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Edit:
    """Converts a tensor of the converter to the family's.

    Args:
        rows, columns: Numbers of the file's rows and columns [N], [K], in the family's order; None: the same, as is an order that moves
            nothing: blocks of a weight whose columns are moved lie in another form.
        value: After that, of the values; None: the same.
        flat: The parts of a weight are joined number by number, not row by row.
    """

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    value: Callable[[Tensor], Tensor] | None = None
    flat: bool = False

    def __post_init__(self) -> None:
        for field in ("rows", "columns"):
            order = getattr(self, field)
            if order is not None and np.array_equal(order, np.arange(len(order))):
                object.__setattr__(self, field, None)

    def applied(self, tensor: Tensor) -> Tensor:
        import torch

        if self.rows is not None:
            tensor = tensor[torch.from_numpy(self.rows)]
        if self.columns is not None and tensor.dim() > 1:
            tensor = tensor[:, torch.from_numpy(self.columns)]
        return tensor if self.value is None else self.value(tensor)


AS_IT_IS = Edit()


def unpaired(rows: int, heads: int) -> np.ndarray:
    """Rows [N] of a projection whose rotation pairs neighbours (2i, 2i+1) in the order of one that pairs halves (i, i + D/2)."""
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).ravel()


def grouped(heads: int, groups: int, size: int) -> np.ndarray:
    """Channels [H * size] grouped by group; the file interleaves the groups' heads."""
    return np.arange(heads * size).reshape(heads // groups, groups, size).transpose(1, 0, 2).ravel()
