"""What tune tries for the kernels of still::CausalConv. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one

MOVES: dict[str, list[Setting]] = {
    "conv": [*one("BT", 8, 16, 32, 64), *one("BC", 64, 128, 256), *one("num_warps", 2, 4, 8)],
    "commit": [*one("BC", 64, 128, 256)],
    "step": [*one("BC", 32, 64, 128, 256), *one("num_warps", 1, 2, 4)],
}
"""What is tried from the current setting and then from better ones, by kernel."""
