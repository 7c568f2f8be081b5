"""Block sizes of the kernel of still::Decay."""

from __future__ import annotations

from still_kernels.tile import KernelTile

TILES = {"decay": KernelTile({"BLOCK": 32}, num_warps=1)}
