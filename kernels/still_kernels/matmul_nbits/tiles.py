"""Block sizes and warps of the kernels. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable

DENSE_WEIGHTS = 1 << 26
"""Weights that are half precision numbers at a time: 128 MB, of which products of 2,048 rows have several waves of blocks."""
WIDE_SHARED = 150 << 10
"""Shared memory that blocks of 128 x 256 take."""

FEW = {4: ((16, 8, 2, 1), (16, 4, 2, 1), (32, 2, 2, 0)), 8: ((16, 8, 2, 2), (16, 4, 4, 2), (32, 2, 2, 2))}
"""Outputs, warps, units and what is asked for ahead (`gluon_few.few_kernel`) of a few rows, by bits and span. Best of 84 and 22 on an H200
over the products of Llama-3.1-8B at one and at eight rows (docs/notebook/quantization.md)."""


@lru_cache
def tile_table(bits: int, aligned: int, span: int, arch: int) -> TileTable:
    """The table of a weight's bits, for outputs that are a multiple of 8 or not and of a span (`plan.SPANS`), on an architecture (90)."""
    wide = aligned and SHARED_BYTES[arch] >= WIDE_SHARED and arch >= 90
    product = (
        (256, 128, 64, 3) if wide else (128, 128, 64, 3) if SHARED_BYTES[arch] >= WIDE_SHARED else (128, 128, 32, 3)
    )
    few_outputs, warps, units, ahead = FEW[bits][span]
    few = {"BN": few_outputs, "SPLITS": warps, "UNITS": units, "AHEAD": ahead}
    rows, outputs, inner, stages = product
    tiles = {
        "few": KernelTile(few, warps),
        "unpack": KernelTile({"BN": 8, "BW": 64}, 4),
        "multiply": KernelTile({"BM": rows, "BN": outputs, "BK": inner, "GROUP": 8, "STAGES": stages}, 8, stages),
    }
    return TileTable(tiles, {"dense_weights": DENSE_WEIGHTS})
