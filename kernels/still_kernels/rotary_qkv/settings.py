"""What tune tries for the kernel of still::RotaryQkv. Integers only."""

from __future__ import annotations

from still_kernels.tile import Setting, one

MOVES: dict[str, list[Setting]] = {"rotary": [*one("BC", 128, 256, 512, 1024, 2048), *one("num_warps", 1, 2, 4, 8)]}
"""What is tried from the current setting and then from better ones, by kernel."""
