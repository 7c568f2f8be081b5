"""Columns and warps of the kernel. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import KernelTile, TileTable

COLUMNS = 512
"""Of a token, of one program: SmolLM2's in three programs, Llama-3.1-8B's with a gate in twenty."""


@lru_cache
def tile_table() -> TileTable:
    """One for every variant and architecture: time is that of a launch, or of reading memory."""
    return TileTable({"rotary": KernelTile({"BC": COLUMNS}, 2)})
