"""What tune tries for the kernels of still::LinearAttention, and which settings do not go together. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, TileTable, one, stages

MOVES: dict[str, list[Setting]] = {
    "prepare": [
        *one("num_warps", 1, 2, 4),
        *one("max_registers", None, 128, 168, 255),
        {"C": 32, "LEVELS": 5, "scan.C": 32},
    ],
    "scan": [
        *stages(1, 2, 3),
        *one("BV", 32, 64, 128),
        {"C": 32, "prepare.C": 32, "prepare.LEVELS": 5},
        *one("num_warps", 2, 4, 8),
        *one("max_registers", None, 168),
    ],
    "decode": [
        *one("BV", 16, 32, 64, 128),
        *one("num_warps", 1, 2, 4, 8),
    ],
    "segments": one("segment_chunks", 64, 128, 256, 512, 1024),
}
"""What is tried from the current setting and then from better ones, by kernel; segments are settings of the whole call."""


def misfit(table: TileTable, arch: int) -> str:
    """Why the block sizes of a table do not go together on an architecture (90 for sm_90), or nothing."""
    prepare, scan = (table.kernels()[name] for name in ("prepare", "scan"))
    if prepare.constants["C"] != scan.constants["C"]:
        return "both steps have chunks of one size"
    if arch == 90 and (scan.constants["BV"] < 64 or scan.num_warps != 4):
        return "scan has 64 columns at least and 4 warps on sm_90 (ptxas 12.8: docs/notebook/kernels.md)"
    return ""
