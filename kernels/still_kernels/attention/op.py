"""still::Attention for generic rooms."""

from __future__ import annotations

from still_kernels.attention.variants import KERNELS
from still_kernels.op_kernels import Op, imported

OP = Op(KERNELS, imported("still_kernels.attention.work", "WORK"))
