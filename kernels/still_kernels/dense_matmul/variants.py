"""What the kernels of still::DenseMatMul are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from still_kernels import op_kernels
from still_kernels.dense_matmul.plan import PLAN
from still_kernels.dense_matmul.tiles import tile_table
from still_kernels.op_kernels import Build, OpKernels, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    turned: Whether the weight is [O, I].
    normed, residual: Whether there are such inputs.
    aligned: Whether inputs and outputs are multiples of 8, which may be read and stored at once.
    whole: Whether inputs are a multiple of `plan.INNER`.
    span: How many outputs there are (`plan.SPANS`).
    """

    dtype: str = "float16"
    turned: int = 0
    normed: int = 0
    residual: int = 0
    aligned: int = 1
    whole: int = 1
    span: int = 0
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def check_types(dtype: str, count_dtype: str) -> None:
    """Raise ConfigError for a type that products have no kernels for."""
    op_kernels.check_types(dtype, count_dtype, DTYPES)


def default_variants() -> list[Variant]:
    """Both types: a plain product of each span, one behind a norm, one with a residual, and a head."""
    plain = [Variant(dtype, span=span) for dtype in DTYPES for span in range(4)]
    return [
        *plain,
        *(Variant(dtype, normed=1, span=1) for dtype in DTYPES),
        *(Variant(dtype, residual=1) for dtype in DTYPES),
        *(Variant(dtype, turned=1, normed=1, span=3) for dtype in DTYPES),
    ]


def plan_constants(table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    tiles = {name.removesuffix("_tma"): tile.constants for name, tile in table.tiles.items()}
    return {
        "few_outputs": tiles["few"]["BN"],
        "some_rows": tiles["some"]["BM"],
        "some_outputs": tiles["some"]["BN"],
        "row_block": tiles["many"]["BM"],
        "output_block": tiles["many"]["BN"],
        **table.host,
    }


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    if table is None:
        table = tile_table(variant.aligned, variant.span, arch, variant.normed, variant.turned)
    absent = {"weight" if variant.turned else "turned_weight"}
    absent |= {name for name, given in (("norm_weight", variant.normed), ("residual", variant.residual)) if not given}
    return Build(
        table.kernels(), {"ALIGNED": variant.aligned, "WHOLE": variant.whole}, plan_constants(table), frozenset(absent)
    )


COVERED = (
    Check(
        f"dtype in ({', '.join(map(repr, DTYPES))},)",
        f"activations are {{dtype}}; products with dense weights have kernels for {', '.join(DTYPES)}.",
    ),
)

KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.dense_matmul.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=COVERED,
    covered_ahead=COVERED,
    work=imported("still_kernels.dense_matmul.work", "WORK"),
)
