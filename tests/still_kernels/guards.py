"""Margins around what kernels write, and grids whose programs run in another order: what cases of all ops share."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator

import torch

GUARD = 1024  # elements before and after each guarded tensor


class Guarded:
    """Makes tensors with a margin on both sides, filled with NaN or a sentinel, and finds writes outside."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []

    def empty(self, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of garbage within margins."""
        size = math.prod(shape)
        block = torch.full((size + 2 * GUARD,), 77, dtype=dtype, device=like.device)
        self.blocks.append(block)
        inner = block[GUARD : GUARD + size].view(shape)
        return inner.fill_(float("nan") if dtype.is_floating_point else 113)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy within margins."""
        return self.empty(tensor, tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def check(self) -> None:
        """Fail if a margin was written."""
        for block in self.blocks:
            assert bool((block[:GUARD] == 77).all()) and bool((block[-GUARD:] == 77).all()), (
                f"a kernel wrote outside a buffer of {block.numel() - 2 * GUARD} elements, {block.dtype}"
            )
        self.blocks.clear()


@contextlib.contextmanager
def guarded_workspaces() -> Iterator[Guarded]:
    """Workspaces of launches within margins; not of those that follow, in tests of the same process."""
    from still_kernels import launcher

    guarded, before = Guarded(), launcher.allocate
    launcher.allocate = guarded.empty
    try:
        yield guarded
    finally:
        launcher.allocate = before


def shuffle_programs() -> None:
    """From now on the interpreter runs the programs of a grid in some other order at each launch; on hardware they have none."""
    from triton.runtime.interpreter import interpreter_builder as builder

    generator = random.Random(1)
    original, order = builder.set_grid_idx, [0]

    def set_grid_idx(x: int, y: int, z: int) -> None:
        _, ny, nz = builder.grid_dim
        if x == y == z == 0:
            order[:] = range(math.prod(builder.grid_dim))
            generator.shuffle(order)
        i = order[(x * ny + y) * nz + z]
        original(i // (ny * nz), i // nz % ny, i % nz)

    builder.set_grid_idx = set_grid_idx
