"""Block sizes and warps of the kernels. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import KernelTile, TileTable, pow2

MAX_HEAD_DIM = 256
MOST_PARTS = 64
"""Programs that share the coarse means: each that scores loads their results side by side."""
FEW_PROGRAMS = 264
"""That fill the chip: two on each multiprocessor of an H200."""
SPAN_TOKENS = 2048
"""Whose scores are kept at once: 67 MB beside 65,536 tokens of two key/value heads."""


@lru_cache
def tile_table(arch: int, head_dim: int, group: int, wide: bool) -> TileTable:
    """The table of one variant.

    Args:
        arch: Compute capability, 90 for sm_90.
        head_dim: D.
        group: Query heads of a key/value head, filled up to a power of two.
        wide: float32 activations.
    """
    del arch  # the same for all
    means = 32 if pow2(head_dim) * (2 if wide else 1) > 128 else 64
    # H100, a prompt of 65,536 tokens of MiniCPM-SALA's layer: 128 rows and 8 warps 20.5 ms, 64 and 4 28.7 ms.
    rows, warps = (64, 4) if wide else (128, 8)
    tiles = {
        "add": KernelTile({}, 4, 1),
        "normalize": KernelTile({"BM": rows, "BJ": means}, warps, 1),
        "score": KernelTile({"BM": rows, "BJ": means, "BS": MOST_PARTS}, warps, 2),
        "choose": KernelTile({"BC": 1024}, 4, 1),
        "normalize_few": KernelTile({"BM": max(16, group), "BJ": 32}, 4, 1),
        "score_few": KernelTile({"BM": max(16, group), "BJ": means, "BS": MOST_PARTS}, 4, 2),
        "choose_few": KernelTile({"BC": 4096}, 8, 1),
    }
    return TileTable(tiles, {"few_programs": FEW_PROGRAMS, "span_tokens": SPAN_TOKENS})
