"""Columns and warps of the kernel. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import KernelTile, TileTable

COLUMNS, WARPS = 8192, 16
"""Logits that a program has in flight: one program reads all of a row, 49,152 in six turns, Llama's 128,256 in sixteen."""


@lru_cache
def tile_table() -> TileTable:
    """One for every variant and architecture."""
    return TileTable({"greedy": KernelTile({"BC": COLUMNS}, WARPS)})
