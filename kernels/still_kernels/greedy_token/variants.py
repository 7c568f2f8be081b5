"""What the kernel of still::GreedyToken is compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from still_kernels.greedy_token.plan import PLAN
from still_kernels.greedy_token.tiles import tile_table
from still_kernels.op_kernels import DTYPES, Build, OpKernels, check_types, imported
from still_kernels.tile import TileTable


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; everything else is a run-time argument.

    aligned: Whether the vocabulary is a multiple of 8, which may be read at once.
    """

    dtype: str = "float16"
    aligned: int = 1
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def default_variants() -> list[Variant]:
    """All types."""
    return [Variant(dtype) for dtype in DTYPES]


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with another number of columns."""
    table = tile_table() if table is None else table
    return Build(table.kernels(), {"ALIGNED": variant.aligned}, {})


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.greedy_token.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    work=imported("still_kernels.greedy_token.work", "WORK"),
)
