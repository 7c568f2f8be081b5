"""Block sizes and warps of the kernels. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.dense_matmul.tiles import (
    MANY_TMA,
    NORM_COLUMNS,
    SOME,
    SOME_TMA,
    WIDE_SHARED,
    block_tile,
    by_tma,
    few_tile,
    host_constants,
    many_tile,
    split_tile,
    tma_tile,
)
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable

FEW = ((16, 64, 4, 6), (16, 64, 4, 6), (32, 128, 8, 4), (64, 64, 8, 4))
MANY = ((64, 32, 4, 4), (128, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 3))
SOME_GATED = ((64, 32, 4, 4), (64, 32, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3))
"""As those of still::DenseMatMul, with half the outputs: a program computes a gate and a number beside it."""


SOME_GATED_TMA = ((64, 64, 4, 4), (64, 64, 4, 4), (64, 128, 8, 4), (64, 128, 8, 4))
MANY_GATED_TMA = ((64, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 4), (128, 128, 8, 4))
"""The same of kernels that copy by TMA."""


@lru_cache
def tile_table(aligned: int, span: int, gated_span: int, arch: int) -> TileTable:
    """The table of spans of both products, for sizes that are multiples of 8 or not, on an architecture (90 for sm_90)."""
    roomy = SHARED_BYTES[arch] >= WIDE_SHARED
    outputs, inner, warps, stages = FEW[gated_span]
    inner, stages = (inner, stages) if roomy else (64, 3)
    tiles = {
        "norm": KernelTile({"BC": NORM_COLUMNS}, 4),
        "few_gated": KernelTile({"BN": outputs, "BK": inner, "STAGES": stages}, warps, stages),
        "few_down": few_tile(span, roomy),
        "split_down": split_tile(span, roomy, aligned),
    }
    if tma := by_tma(roomy, aligned, arch):
        tiles |= {
            "some_gated_tma": tma_tile(SOME_GATED_TMA[gated_span], "rows", "gate_up"),
            "some_down_tma": tma_tile(SOME_TMA[span], "middle", "down"),
            "many_gated_tma": tma_tile(MANY_GATED_TMA[gated_span], "rows", "gate_up"),
            "many_down_tma": tma_tile(MANY_TMA[span], "middle", "down"),
        }
    else:
        narrow = gated_span and not (roomy and aligned and arch >= 90)  # sums would not fit into fewer registers
        tiles |= {
            "some_gated": block_tile(SOME_GATED[gated_span], roomy),
            "some_down": block_tile(SOME[span], roomy),
            "many_gated": block_tile((128, 64, 8, 3) if narrow else MANY[gated_span], roomy),
            "many_down": many_tile(span, roomy, aligned, arch),
        }
    return TileTable(tiles, host_constants(span, tma))
