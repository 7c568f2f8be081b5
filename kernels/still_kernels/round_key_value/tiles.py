"""Rows and warps of the kernel. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import KernelTile, TileTable

MAX_HEAD_DIM = 256
ROWS = 4
"""Of one program, heads of tokens."""


@lru_cache
def tile_table() -> TileTable:
    """One for every variant and architecture: time is that of a launch, or of reading memory."""
    return TileTable({"round": KernelTile({"BR": ROWS}, 2)})
