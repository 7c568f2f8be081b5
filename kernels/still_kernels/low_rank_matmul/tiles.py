"""Block sizes and warps of the kernels. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import KernelTile, TileTable

RANK = 64
"""Numbers between the products that a program of a few rows has at a time."""


@lru_cache
def tile_table() -> TileTable:
    """One for every variant and architecture: 60 KB of shared memory for a few rows, all programs of a step at once."""
    many = {"BM": 64, "BN": 64, "BK": 64, "GROUP": 8, "STAGES": 3}
    return TileTable(
        {
            "low_rank": KernelTile({"BN": 32, "BK": 128, "BR": RANK, "STAGES": 3}, 4, 3),
            "lower": KernelTile(many, 4, 3),
            "raise": KernelTile({**many, "BN": 128, "BK": 32}, 4, 3),
        }
    )
