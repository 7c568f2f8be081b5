"""still::Decay for the registry of kernels."""

from __future__ import annotations

from still_kernels.op_kernels import Op
from tests.toy.variants import KERNELS

OP = Op(KERNELS)
