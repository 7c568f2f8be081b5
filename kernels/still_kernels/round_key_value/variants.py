"""What the kernel of still::RoundKeyValue is compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from still_kernels.dense_matmul.variants import DTYPES, check_types
from still_kernels.op_kernels import Build, OpKernels, imported
from still_kernels.plan import Check
from still_kernels.round_key_value.plan import PLAN
from still_kernels.round_key_value.tiles import MAX_HEAD_DIM, tile_table
from still_kernels.tile import TileTable, pow2


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; everything else is a run-time argument."""

    dtype: str = "float16"
    head_dim: int = 128
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        check_types(self.dtype, self.count_dtype)


def default_variants() -> list[Variant]:
    """Both types, head sizes 64 and 128."""
    return [Variant(dtype, head_dim) for dtype, head_dim in product(DTYPES, (64, 128))]


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with another number of rows."""
    table = tile_table() if table is None else table
    constants = {"row_block": table.tiles["round"].constants["BR"]}
    return Build(table.kernels(), {"D": variant.head_dim, "DP": pow2(variant.head_dim)}, constants)


COVERED = (
    Check(
        f"dtype in ({', '.join(map(repr, DTYPES))},)",
        f"activations are {{dtype}}; roundings of keys and values have kernels for {', '.join(DTYPES)}.",
    ),
    Check(f"D <= {MAX_HEAD_DIM}", f"head_dim={{D}}; the kernels have at most {MAX_HEAD_DIM}."),
)

KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.round_key_value.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=COVERED,
    covered_ahead=COVERED,
    work=imported("still_kernels.round_key_value.work", "WORK"),
)
