"""Block sizes, warps and pipeline stages of the kernels, by architecture and head size. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, for_two_programs, pow2

MAX_HEAD_DIM = 256
MOST_PARTS = 64
"""Programs that share a token's blocks: one loads their results side by side."""
DECODE_PROGRAMS = 264
"""That fill the chip: two on each multiprocessor of an H200."""
SPAN_TOKENS = 8192
"""Of a prompt, whose tiles are united at once: 17 MB for tiles of four tokens beside 65,536."""


@lru_cache
def tile_table(arch: int, head_dim: int, block: int, wide: bool) -> TileTable:
    """The table of one variant.

    Args:
        arch: Compute capability, 90 for sm_90.
        head_dim: D.
        block: Tokens of a block of keys.
        wide: float32 activations.
    """
    dim = pow2(head_dim)
    small = SHARED_BYTES.get(arch, 99 << 10) < (160 << 10)
    row_bytes = dim * (4 if wide else 2)
    keys = min(pow2(block), 16 if row_bytes > 512 else 32 if row_bytes > 256 else 64)
    stages = 2 if small or row_bytes > 256 else 3
    # 32 keys at a time leave no room for two programs either where shared memory is small.
    ahead = stages if wide else for_two_programs(SHARED_BYTES.get(arch, 99 << 10), dim, keys, stages)[1]
    dependent = arch >= 90
    pdl = {"PDL": int(dependent)}
    tiles = {
        "append": KernelTile({"BT": 16, **pdl}, 4, 1, None, dependent),
        "decode": KernelTile({"BR": 16, "BN": keys, "STAGES": stages, **pdl}, 4, stages, None, dependent),
        "merge": KernelTile({"BS": MOST_PARTS, **pdl}, 4, 1, None, dependent),
        "unite": KernelTile({"BC": 512}, 4, 1),
        # H100, 65,536 tokens that choose alike: 64 rows and 4 warps 25.4 ms, 128 and 8, which read half the bytes, 30.3.
        "attend": KernelTile({"BM": 64, "BN": keys, "STAGES": ahead}, 4, ahead),
    }
    return TileTable(tiles, {"decode_programs": DECODE_PROGRAMS, "span_tokens": SPAN_TOKENS})
