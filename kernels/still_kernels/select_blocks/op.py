"""still::SelectBlocks for generic rooms."""

from __future__ import annotations

from still_kernels.op_kernels import Op, imported
from still_kernels.select_blocks.variants import KERNELS

OP = Op(KERNELS, imported("still_kernels.select_blocks.work", "WORK"))
