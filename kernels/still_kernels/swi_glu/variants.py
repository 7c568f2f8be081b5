"""What the kernel of still::SwiGlu is compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from still_kernels.dense_matmul.variants import DTYPES, check_types
from still_kernels.op_kernels import Build, OpKernels, imported
from still_kernels.plan import Check
from still_kernels.swi_glu.plan import PLAN
from still_kernels.swi_glu.tiles import tile_table
from still_kernels.tile import TileTable


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; everything else is a run-time argument.

    aligned: Whether a half is a multiple of 8, which may be read and stored at once.
    """

    dtype: str = "float16"
    aligned: int = 1
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def default_variants() -> list[Variant]:
    """Both types."""
    return [Variant(dtype) for dtype in DTYPES]


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with another number of columns."""
    table = tile_table() if table is None else table
    constants = {"column_block": table.tiles["swi_glu"].constants["BC"]}
    return Build(table.kernels(), {"ALIGNED": variant.aligned}, constants)


COVERED = (
    Check(
        f"dtype in ({', '.join(map(repr, DTYPES))},)",
        f"activations are {{dtype}}; gates have kernels for {', '.join(DTYPES)}.",
    ),
)

KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.swi_glu.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=COVERED,
    covered_ahead=COVERED,
    work=imported("still_kernels.swi_glu.work", "WORK"),
)
