"""What the kernel of still::RotaryQkv is compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from still_kernels.dense_matmul.variants import DTYPES, check_types
from still_kernels.op_kernels import Build, OpKernels, imported
from still_kernels.plan import Check
from still_kernels.rotary_qkv.plan import PLAN
from still_kernels.rotary_qkv.tiles import tile_table
from still_kernels.tile import TileTable


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; everything else is a run-time argument.

    gated, biased, apart: Whether there is a gate, a bias of it, and numbers of it beside the input.
    aligned: Whether widths and halves of heads are multiples of 8, which may be read and stored at once.
    """

    dtype: str = "float16"
    gated: int = 0
    biased: int = 0
    aligned: int = 1
    apart: int = 0
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def default_variants() -> list[Variant]:
    """Both types, without a gate and with one that has a bias."""
    return [Variant(dtype, gated, gated) for dtype, gated in product(DTYPES, (0, 1))]


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with another number of columns."""
    table = tile_table() if table is None else table
    there = {"gate_bias": variant.biased, "gate": variant.gated, "gate_input": variant.apart}
    constants = {"column_block": table.tiles["rotary"].constants["BC"]}
    return Build(
        table.kernels(),
        {"ALIGNED": variant.aligned},
        constants,
        frozenset(name for name, given in there.items() if not given),
    )


COVERED = (
    Check(
        f"dtype in ({', '.join(map(repr, DTYPES))},)",
        f"activations are {{dtype}}; the rotation has kernels for {', '.join(DTYPES)}.",
    ),
)

KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.rotary_qkv.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=COVERED,
    covered_ahead=COVERED,
    work=imported("still_kernels.rotary_qkv.work", "WORK"),
)
