"""What tune tries for the kernel of still::RoundKeyValue. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one

MOVES: dict[str, list[Setting]] = {"round": [*one("BR", 1, 2, 4, 8, 16), *one("num_warps", 1, 2, 4, 8)]}
"""What is tried from the current setting and then from better ones, by kernel."""
