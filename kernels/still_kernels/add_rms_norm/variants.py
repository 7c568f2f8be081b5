"""What the kernel of still::AddRmsNorm is compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from still_kernels.add_rms_norm.plan import PLAN
from still_kernels.add_rms_norm.tiles import tile_table
from still_kernels.dense_matmul.variants import DTYPES, check_types
from still_kernels.op_kernels import Build, OpKernels, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; everything else is a run-time argument.

    wide: Whether a token has more numbers than `plan.COLUMNS`.
    summed: Whether there is a residual.
    aligned: Whether it has a multiple of 8, which may be read and stored at once.
    """

    dtype: str = "float16"
    wide: int = 0
    summed: int = 1
    aligned: int = 1
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def default_variants() -> list[Variant]:
    """Both types and widths, with a residual and without one."""
    return [Variant(dtype, wide, summed) for dtype, wide, summed in product(DTYPES, (0, 1), (1, 0))]


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with another number of columns."""
    table = tile_table(variant.wide) if table is None else table
    absent = frozenset(() if variant.summed else ("residual",))
    return Build(table.kernels(), {"ALIGNED": variant.aligned}, {}, absent)


COVERED = (
    Check(
        f"dtype in ({', '.join(map(repr, DTYPES))},)",
        f"activations are {{dtype}}; sums with their norms have kernels for {', '.join(DTYPES)}.",
    ),
)

KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.add_rms_norm.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=COVERED,
    covered_ahead=COVERED,
    work=imported("still_kernels.add_rms_norm.work", "WORK"),
)
