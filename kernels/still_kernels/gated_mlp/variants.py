"""What the kernels of still::GatedMlp are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from still_kernels.dense_matmul.variants import COVERED, DTYPES, check_types
from still_kernels.gated_mlp.plan import PLAN
from still_kernels.gated_mlp.tiles import tile_table
from still_kernels.op_kernels import Build, OpKernels, imported
from still_kernels.tile import TileTable


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    aligned: Whether sizes are multiples of 8, which may be read and stored at once.
    whole: Whether they are multiples of `still_kernels.dense_matmul.plan.INNER`.
    span, gated_span: How many outputs the second product has, and the first (`still_kernels.dense_matmul.plan.SPANS`).
    """

    dtype: str = "float16"
    aligned: int = 1
    whole: int = 1
    span: int = 0
    gated_span: int = 1
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def default_variants() -> list[Variant]:
    """Both types, of SmolLM2's sizes and of Llama's."""
    return [Variant(dtype, 1, 1, *spans) for dtype in DTYPES for spans in ((0, 1), (2, 3))]


def plan_constants(table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    tiles = {name.removesuffix("_tma"): tile.constants for name, tile in table.tiles.items()}
    return {
        "gated_outputs": tiles["few_gated"]["BN"],
        "some_gated_rows": tiles["some_gated"]["BM"],
        "some_gated_outputs": tiles["some_gated"]["BN"],
        "some_rows": tiles["some_down"]["BM"],
        "some_outputs": tiles["some_down"]["BN"],
        "gated_rows": tiles["many_gated"]["BM"],
        "gated_block": tiles["many_gated"]["BN"],
        "few_outputs": tiles["few_down"]["BN"],
        "row_block": tiles["many_down"]["BM"],
        "output_block": tiles["many_down"]["BN"],
        **table.host,
    }


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    table = tile_table(variant.aligned, variant.span, variant.gated_span, arch) if table is None else table
    return Build(table.kernels(), {"ALIGNED": variant.aligned, "WHOLE": variant.whole}, plan_constants(table))


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.gated_mlp.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=COVERED,
    covered_ahead=COVERED,
    work=imported("still_kernels.gated_mlp.work", "WORK"),
)
