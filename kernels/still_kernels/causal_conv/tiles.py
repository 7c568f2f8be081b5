"""Block sizes and warps of the kernels. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import KernelTile, TileTable

MAX_TAPS = 16


@lru_cache
def tile_table(arch: int) -> TileTable:
    """The table of an architecture (90 for sm_90)."""
    dependent = arch >= 90
    tiles = {
        "conv": KernelTile({"BT": 16, "BC": 128}, 4, 1),
        "commit": KernelTile({"BC": 128}, 4, 1),
        "step": KernelTile({"BC": 128, "PDL": int(dependent)}, 4, 1, None, dependent),
    }
    return TileTable(tiles)
