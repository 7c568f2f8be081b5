"""How the state of a request lies in the pages of an engine: it does not grow, so that one page holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError

ALIGNMENT = 64
"""Bytes that pages are multiples of: kernels read rows in wide pieces."""


@dataclass(frozen=True)
class Pages:
    """Pages that begin with a state [H, D, V] in float32.

    heads, dim, size: H, D, V.
    size_bytes: From a page to the next.
    """

    heads: int
    dim: int
    size: int
    size_bytes: int

    @classmethod
    def of(cls, heads: int, dim: int, size: int) -> Pages:
        """The smallest that hold it."""
        return cls(heads, dim, size, -(-heads * dim * size * 4 // ALIGNMENT) * ALIGNMENT)

    columns = 1

    def after(self, tokens: int) -> int:
        """Pages of a request of `tokens` tokens."""
        return 1

    def changing(self, tokens: int) -> tuple[int, ...]:
        """Columns of those pages of a request of `tokens` tokens that later tokens still write to."""
        return (0,)

    def padded(self, size_bytes: int) -> Pages:
        """The same in pages of an engine that made them larger.

        Raises:
            ShapeError: They do not hold the state, or are not aligned.
        """
        if size_bytes < self.size_bytes or size_bytes % ALIGNMENT:
            raise ShapeError(
                f"pages of {size_bytes} bytes; expected a multiple of {ALIGNMENT}, at least {self.size_bytes}."
            )
        return replace(self, size_bytes=size_bytes)

    def view(self, memory: Tensor) -> Tensor:
        """The states [pages, H, D, V] in int8 [pages, bytes], whose rows lie `size_bytes` apart.

        Raises:
            ShapeError: They lie otherwise.
        """
        # PyTorch gives the stride of a single row any value.
        apart = memory.stride(0) if len(memory) > 1 else self.size_bytes
        if memory.dtype != torch.int8 or memory.stride(1) != 1 or apart != self.size_bytes:
            raise ShapeError(
                f"memory {memory.dtype} {list(memory.shape)} has strides {memory.stride()}; expected int8, pages {self.size_bytes} "
                "bytes apart, the bytes of each side by side."
            )
        shape = (self.heads, self.dim, self.size)
        return memory[:, : 4 * self.heads * self.dim * self.size].view(torch.float32).unflatten(1, shape)
