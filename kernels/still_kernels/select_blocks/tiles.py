"""Block sizes and warps of the kernels. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, pow2

MAX_HEAD_DIM = 256
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
    dependent = arch >= 90
    pdl = {"PDL": int(dependent)}
    means = 32 if pow2(head_dim) * (2 if wide else 1) > 128 else 64
    # H100, a prompt of 65,536 tokens of MiniCPM-SALA's layer: 128 rows and 8 warps 20.5 ms, 64 and 4 28.7 ms.
    # Two stages leave room for two programs on a multiprocessor: what one exponentiates hides behind the other's products.
    small = SHARED_BYTES.get(arch, 99 << 10) < (160 << 10)
    rows, warps = (64, 4) if wide or (small and head_dim > 128) else (128, 8)
    stages = 1 if small else 2
    few = max(16, group)
    tiles = {
        "add": KernelTile(pdl, 4, 1, None, dependent),
        "multiply": KernelTile({"BM": few, "BJ": means, "STAGES": 2, **pdl}, 4, 2, None, dependent),
        "mean": KernelTile({"BJ": means}, 4, 1),
        "normalize": KernelTile({"BM": rows, "BJ": means, "STAGES": stages}, warps, stages),
        "score": KernelTile({"BM": rows, "BJ": means, "BS": 32, "STAGES": stages, "KEPT": 0, "PDL": 0}, warps, stages),
        "choose": KernelTile({"BC": 1024, "PDL": 0}, 4, 1),
        # Of parts of the normalizer BS at most: each program loads them side by side.
        "score_few": KernelTile(
            {"BM": few, "BJ": 128, "BS": 128, "STAGES": 1, "KEPT": 1, **pdl}, 4, 1, None, dependent
        ),
        "choose_few": KernelTile({"BC": 4096, **pdl}, 8, 1, None, dependent),
    }
    return TileTable(tiles, {"few_programs": FEW_PROGRAMS, "span_tokens": SPAN_TOKENS})
