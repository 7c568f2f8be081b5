"""Changes of tensors by llama.cpp's converter, to be undone: order of rows and columns, values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Edit:
    """How to get a family's tensor from the converter's.

    Args:
        rows, columns: Indices of the file's rows [N] and columns [K] in the family's order; None: unchanged. Identity orders become None,
            because blocks of a weight with moved columns need another form.
        value: Applied to the values afterwards; None: unchanged.
        flat: Parts of a weight are joined elementwise instead of by rows.
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
    """Rows [N] of a projection that rotates neighbours (2i, 2i+1), in the order for rotating halves (i, i + D/2)."""
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).ravel()


def grouped(heads: int, groups: int, size: int) -> np.ndarray:
    """Channels [H * size] of heads ordered by group, where the file has the first heads of all groups first."""
    return np.arange(heads * size).reshape(heads // groups, groups, size).transpose(1, 0, 2).ravel()
