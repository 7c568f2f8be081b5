"""What tune tries for the kernel of still::GreedyToken. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one

MOVES: dict[str, list[Setting]] = {"greedy": [*one("BC", 4096, 8192, 16384), *one("num_warps", 8, 16, 32)]}
"""What is tried from the current setting and then from better ones, by kernel."""
