"""What tune tries for the kernel of still::AddRmsNorm. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one

MOVES: dict[str, list[Setting]] = {"add_norm": [*one("BC", 512, 1024, 2048, 4096), *one("num_warps", 2, 4, 8, 16)]}
"""What is tried from the current setting and then from better ones, by kernel."""
