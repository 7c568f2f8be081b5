"""What tune tries for the kernels of still::MatMulNBits. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one, stages

MOVES: dict[str, list[Setting]] = {
    "few": [
        *one("BN", 16, 32, 64),
        *one("UNITS", 1, 2, 4),
        *one("AHEAD", 0, 1, 2),
        {"SPLITS": 2, "num_warps": 2},
        {"SPLITS": 4, "num_warps": 4},
        {"SPLITS": 8, "num_warps": 8},
    ],
    "unpack": [*one("BN", 4, 8, 16, 32), *one("BW", 16, 32, 64, 128), *one("num_warps", 2, 4, 8)],
    "multiply": [
        *one("BM", 64, 128, 256),
        *one("BN", 64, 128, 256),
        *one("BK", 32, 64),
        *stages(2, 3, 4),
        *one("num_warps", 4, 8),
    ],
}
"""What is tried from the current setting and then from better ones, by kernel."""
