"""Layout of a request's state in an engine's pages. The state does not grow, so it needs one page."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError

ALIGNMENT = 64
"""Page sizes are multiples of this many bytes, because kernels read rows in wide pieces."""


@dataclass(frozen=True)
class Pages:
    """Pages that start with a state [H, D, V] in float32.

    heads, dim, size: H, D, V.
    size_bytes: From a page to the next.
    """

    heads: int
    dim: int
    size: int
    size_bytes: int

    @classmethod
    def of(cls, heads: int, dim: int, size: int) -> Pages:
        """The smallest pages for these sizes."""
        return cls(heads, dim, size, -(-heads * dim * size * 4 // ALIGNMENT) * ALIGNMENT)

    columns = 1

    def after(self, tokens: int) -> int:
        """Number of pages of a request of `tokens` tokens."""
        return 1

    def changing(self, tokens: int) -> tuple[int, ...]:
        """Table columns of a request of `tokens` tokens whose pages later tokens still write."""
        return (0,)

    def padded(self, size_bytes: int) -> Pages:
        """The same in an engine's larger pages.

        Raises:
            ShapeError: The state does not fit, or pages are not aligned.
        """
        if size_bytes < self.size_bytes or size_bytes % ALIGNMENT:
            raise ShapeError(
                f"pages of {size_bytes} bytes; expected a multiple of {ALIGNMENT}, at least {self.size_bytes}."
            )
        return replace(self, size_bytes=size_bytes)

    def view(self, memory: Tensor) -> Tensor:
        """The states [pages, H, D, V] in int8 [pages, bytes], whose rows are `size_bytes` apart.

        Raises:
            ShapeError: The memory has another layout.
        """
        # PyTorch sets the stride of a single row arbitrarily.
        apart = memory.stride(0) if len(memory) > 1 else self.size_bytes
        if memory.dtype != torch.int8 or memory.stride(1) != 1 or apart != self.size_bytes:
            raise ShapeError(
                f"memory {memory.dtype} {list(memory.shape)} has strides {memory.stride()}; expected int8, pages {self.size_bytes} "
                "bytes apart, the bytes of each side by side."
            )
        shape = (self.heads, self.dim, self.size)
        return memory[:, : 4 * self.heads * self.dim * self.size].view(torch.float32).unflatten(1, shape)
