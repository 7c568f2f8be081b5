"""What tune tries for the kernels of still::LowRankMatMul. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one, stages

_MANY: list[Setting] = [
    *one("BM", 64, 128),
    *one("BN", 64, 128),
    *one("BK", 32, 64),
    *stages(2, 3, 4),
    *one("num_warps", 4, 8),
]
MOVES: dict[str, list[Setting]] = {
    "low_rank": [
        *one("BN", 16, 32, 64),
        *one("BK", 64, 128, 256),
        *one("BR", 32, 64),
        *stages(2, 3, 4),
        *one("num_warps", 2, 4, 8),
    ],
    "lower": _MANY,
    "raise": _MANY,
}
"""What is tried from the current setting and then from better ones, by kernel."""
