"""What tune tries for the kernels of still::DenseMatMul. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one, stages

FEW: list[Setting] = [*one("BN", 16, 32, 64, 128), *one("BK", 64, 128, 256), *stages(3, 4, 6), *one("num_warps", 4, 8)]
SPLIT: list[Setting] = [
    *one("split_programs", 64, 128, 192, 256),
    *one("split_inputs", 512, 1024, 2048),
    *stages(3, 4, 5, 6),
    *one("num_warps", 4, 8),
]
MANY: list[Setting] = [
    *one("BM", 64, 128, 256),
    *one("BN", 64, 128, 256),
    *one("BK", 32, 64),
    *stages(2, 3, 4),
    *one("num_warps", 4, 8),
]
MOVES: dict[str, list[Setting]] = {
    "few": FEW,
    "split": SPLIT,
    "some": MANY,
    "many": MANY,
}
"""What is tried from the current setting and then from better ones, by kernel."""
