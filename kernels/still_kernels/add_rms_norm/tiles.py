"""Columns and warps of the kernel. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.add_rms_norm.plan import COLUMNS
from still_kernels.tile import KernelTile, TileTable


@lru_cache
def tile_table(wide: int) -> TileTable:
    """A token of a step in one block: SmolLM2's 576 numbers, Llama-3.1-8B's 4,096, which are 16 a thread."""
    return TileTable({"add_norm": KernelTile({"BC": 4 * COLUMNS}, 8) if wide else KernelTile({"BC": COLUMNS}, 4)})
