"""What tune tries for the kernels of still::LinearAttention, and which settings do not go together. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, TileTable, one, stages

STEPS = ("prepare", "scan", "output")
"""Kernels of a prompt."""
SHORT: Setting = {"prepare.C": 32, "prepare.LEVELS": 5, "scan.C": 32, "output.C": 32}
"""Chunks of 32 tokens in the place of 64."""

MOVES: dict[str, list[Setting]] = {
    "prepare": [
        *one("num_warps", 1, 2, 4),
        *one("max_registers", None, 128, 168, 255),
        *one("BD", 16, 32, 64, 128),
        SHORT,
    ],
    "scan": [
        *stages(1, 2, 3, 4),
        *one("BV", 16, 32, 64),
        SHORT,
        *one("num_warps", 1, 2, 4, 8),
        *one("max_registers", None, 168),
    ],
    "output": [
        *one("BV", 32, 64, 128),
        SHORT,
        *one("num_warps", 2, 4, 8),
        *one("max_registers", None, 128, 168),
    ],
    "decode": [
        *one("BV", 16, 32, 64, 128),
        *one("num_warps", 1, 2, 4, 8),
    ],
    "segments": one("segment_chunks", 32, 64, 128, 256, 512),
}
"""What is tried from the current setting and then from better ones, by kernel; segments are settings of the whole call."""


def misfit(table: TileTable, arch: int) -> str:
    """Why the block sizes of a table do not go together on an architecture (90 for sm_90), or nothing."""
    tiles = table.kernels()
    if len({tiles[name].constants["C"] for name in STEPS}) > 1:
        return "all steps have chunks of one size"
    if arch == 90 and max(tiles[name].num_warps for name in STEPS) > 4:
        return "the steps of a prompt have 4 warps at most on sm_90 (ptxas 12.8: docs/notebook/kernels.md)"
    return ""
