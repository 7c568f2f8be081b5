"""still::CausalConv for generic rooms."""

from __future__ import annotations

from still_kernels.causal_conv.variants import KERNELS
from still_kernels.op_kernels import Op, imported

OP = Op(KERNELS, imported("still_kernels.causal_conv.work", "WORK"))
