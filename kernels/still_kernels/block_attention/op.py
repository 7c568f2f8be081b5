"""still::BlockAttention for generic rooms."""

from __future__ import annotations

from still_kernels.block_attention.variants import KERNELS
from still_kernels.op_kernels import Op, imported

OP = Op(KERNELS, imported("still_kernels.block_attention.work", "WORK"))
