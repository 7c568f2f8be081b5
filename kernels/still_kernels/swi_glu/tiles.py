"""Columns and warps of the kernel. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import KernelTile, TileTable

COLUMNS = 1024
"""Of one program, 16 bytes of each half a thread: SmolLM2's 1,536 numbers in two programs, Llama-3.1-8B's 14,336 in fourteen."""


@lru_cache
def tile_table() -> TileTable:
    """One for every variant and architecture: time is that of a launch, or of reading memory."""
    return TileTable({"swi_glu": KernelTile({"BC": COLUMNS}, 4)})
