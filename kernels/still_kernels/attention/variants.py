"""What the kernels of still::Attention are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from still_graphs.ops.spec import CACHE
from still_kernels.attention.plan import PLAN
from still_kernels.attention.tiles import MAX_HEAD_DIM, tile_table
from still_kernels.op_kernels import DTYPES, Build, OpKernels, check_known, combinations, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable, pow2


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument."""

    dtype: str = "bfloat16"
    head_dim: int = 128
    cache: str = "float"
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self, cache=CACHE.choices)


def constants_of(head_dim: int, wide: bool, cache: str = "float") -> dict[str, Any]:
    """Compile-time constants by name; each kernel takes those that it declares."""
    import triton

    return {
        "D": head_dim,
        "DP": pow2(head_dim),
        "CODES": int(cache == "int8"),
        "SETTLE": int(not triton.knobs.runtime.interpret),
        "DOT": "tf32x3" if wide else "tf32",
    }


def plan_constants(table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    decode, attend = (table.tiles[name].constants for name in ("decode", "attend"))
    return {"attend_rows": attend["BM"], "decode_rows": decode["BR"], "most_splits": decode["BS"], **table.host}


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    wide = variant.dtype == "float32"
    table = tile_table(arch, variant.head_dim, wide) if table is None else table
    return Build(
        table.kernels(),
        constants_of(variant.head_dim, wide, variant.cache),
        plan_constants(table),
        frozenset({"key_scale", "value_scale"} if variant.cache == "float" else ()),
    )


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=combinations(Variant, head_dim=(64, 128)),
    build=build,
    functions=imported("still_kernels.attention.functions", "FUNCTIONS"),
    covered=(
        Check(f"dtype in {DTYPES}", f"dtype={{dtype}}; the kernels have {', '.join(DTYPES)}."),
        Check(f"D <= {MAX_HEAD_DIM}", f"head_dim={{D}}; the kernels have at most {MAX_HEAD_DIM}."),
    ),
)
