"""What the kernels of still::LowRankMatMul are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from still_kernels.dense_matmul.variants import COVERED, DTYPES, check_types
from still_kernels.low_rank_matmul.plan import PLAN
from still_kernels.low_rank_matmul.tiles import tile_table
from still_kernels.op_kernels import Build, OpKernels, imported
from still_kernels.tile import TileTable


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    base: Whether there is something that the product is added to.
    aligned: Whether sizes are multiples of 8, which may be read and stored at once.
    """

    dtype: str = "float16"
    base: int = 0
    aligned: int = 1
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def default_variants() -> list[Variant]:
    """Both types, alone and added."""
    return [Variant(dtype, base) for dtype, base in product(DTYPES, (0, 1))]


def plan_constants(table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    few, lower, upper = (table.tiles[name].constants for name in ("low_rank", "lower", "raise"))
    return {
        "few_outputs": few["BN"],
        "low_rows": lower["BM"],
        "low_block": lower["BN"],
        "row_block": upper["BM"],
        "output_block": upper["BN"],
    }


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    table = tile_table() if table is None else table
    absent = frozenset() if variant.base else frozenset({"base"})
    return Build(table.kernels(), {"ALIGNED": variant.aligned}, plan_constants(table), absent)


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.low_rank_matmul.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=COVERED,
    covered_ahead=COVERED,
    work=imported("still_kernels.low_rank_matmul.work", "WORK"),
)
