"""Kernel of still::Decay: its launch, block sizes, what it is compiled for. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass

from still_kernels.op_kernels import Build, Op, OpKernels, imported
from still_kernels.plan import Check, Launch, Plan
from still_kernels.tile import KernelTile
from tests.toy.spec import DECAY

TILES = {"decay": KernelTile({"BLOCK": 32}, num_warps=1)}
CONSTANTS = {"block": TILES["decay"].constants["BLOCK"]}

PLAN = Plan(
    DECAY,
    key={"dtype": "dtype", "count_dtype": "count_dtype"},
    constants=("block",),  # channels of one program
    checks=(Check("decay <= 1", "decay={decay} grows without bound."),),
    arguments={"T": "T", "H": "H", "D": "D", "decay": "decay"},
    steps=(Launch("decay", ("ceil_div(D, block)", "H", "B")),),
)


@dataclass(frozen=True)
class Variant:
    """Kernels for one pair of types."""

    dtype: str = "float16"
    count_dtype: str = "int64"


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=lambda: [Variant()],
    build=lambda variant, arch: Build(TILES, {}, CONSTANTS),
    functions=imported("tests.toy.kernels", "FUNCTIONS"),
)
OP = Op(KERNELS)
