"""Block sizes, warps and pipeline stages of the kernels, by architecture and head size. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, for_two_programs, pow2

MAX_HEAD_DIM = 256
DECODE_ROWS = 16
"""Query rows of one program of decode: the least that a matrix instruction takes."""
MOST_SPLITS = 64
"""Programs that share the cache of one key/value head: the last one loads their results side by side."""
DECODE_PROGRAMS = 264
"""That fill the chip: two on each multiprocessor of an H200."""


@lru_cache
def tile_table(arch: int, head_dim: int, wide: bool) -> TileTable:
    """The table of one variant.

    Args:
        arch: Compute capability, 90 for sm_90.
        head_dim: D.
        wide: float32 activations.
    """
    dim = pow2(head_dim)
    small = SHARED_BYTES.get(arch, 99 << 10) < (160 << 10)
    row_bytes = dim * (4 if wide else 2)
    # Keys and values of a stage: as many stages as leave room for the queries.
    keys = 16 if row_bytes > 512 else 32 if row_bytes > 256 else 64
    # H200, head size 128, 8,192 tokens: 64 rows and 4 warps 1.15 ms (478 TFLOP/s), 128 and 8 1.27 to 1.56 ms.
    rows = 16 if row_bytes > 512 and small else 32 if wide or dim > 128 else 64
    stages = 2 if small or row_bytes > 256 else 3
    near, ahead = (keys, stages) if wide else for_two_programs(SHARED_BYTES.get(arch, 99 << 10), dim, keys, stages)
    tiles = {
        "attend": KernelTile({"BM": rows, "BN": min(near, rows), "STAGES": ahead}, 4, ahead),
        "decode": KernelTile({"BR": DECODE_ROWS, "BN": keys, "BS": MOST_SPLITS, "STAGES": stages}, 4, stages),
    }
    return TileTable(tiles, {"decode_programs": DECODE_PROGRAMS})
