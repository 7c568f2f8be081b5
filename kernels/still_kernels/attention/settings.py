"""What tune tries for the kernels of still::Attention, and which settings do not go together. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, TileTable, one, stages

MOVES: dict[str, list[Setting]] = {
    "attend": [
        *stages(2, 3, 4),
        *one("BM", 32, 64, 128),
        *one("BN", 32, 64, 128),
        {"BM": 128, "num_warps": 8},
        {"BM": 128, "BN": 128, "num_warps": 8, "STAGES": 2, "num_stages": 2},
        *one("num_warps", 2, 4, 8),
        *one("max_registers", None, 128, 168),
    ],
    "decode": [
        *stages(2, 3, 4, 6),
        *one("BN", 16, 32, 64, 128),
        *one("BS", 16, 32, 64),
        *one("num_warps", 2, 4, 8),
        *one("max_registers", None, 96, 128, 168),
        *one("decode_programs", 132, 264, 528),
    ],
}
"""What is tried from the current setting and then from better ones, by kernel."""


def misfit(table: TileTable) -> str:
    """Why the block sizes of a table do not go together, or nothing: tokens of earlier blocks are read BN at a time."""
    attend = table.kernels()["attend"].constants
    return "" if attend["BM"] % attend["BN"] == 0 else "BN of attend divides its BM"
