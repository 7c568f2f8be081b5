"""What tune tries for the kernel of still::SwiGlu. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one

MOVES: dict[str, list[Setting]] = {"swi_glu": [*one("BC", 256, 512, 1024, 2048, 4096), *one("num_warps", 1, 2, 4, 8)]}
"""What is tried from the current setting and then from better ones, by kernel."""
