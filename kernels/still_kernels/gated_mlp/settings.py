"""What tune tries for the kernels of still::GatedMlp. Integers only."""

from __future__ import annotations

from still_kernels.dense_matmul.settings import FEW, MANY, SPLIT
from still_kernels.tile import Setting, one

MOVES: dict[str, list[Setting]] = {
    "few_gated": FEW,
    "many_gated": [*MANY, *one("BN", 32)],
    "few_down": FEW,
    "split_down": SPLIT,
    "some_gated": [*MANY, *one("BN", 32)],
    "some_down": MANY,
    "many_down": MANY,
}
"""What is tried from the current setting and then from better ones, by kernel."""
