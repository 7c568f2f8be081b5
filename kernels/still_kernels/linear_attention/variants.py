"""What the kernels of still::LinearAttention are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from still_graphs.errors import ConfigError
from still_graphs.ops.linear_attention import DELTA, GATED, LINEAR_ATTENTION
from still_kernels.linear_attention.plan import PLAN
from still_kernels.linear_attention.tiles import MAX_HEAD_DIM, MAX_SHARED, tile_table
from still_kernels.op_kernels import DTYPES, Build, OpKernels, check_known, combinations, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable, pow2

RULES = LINEAR_ATTENTION.attribute("update_rule").choices


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    head_dim, value_dim: D, V.
    shared: G, query heads of one state.
    per_key: Whether there is a decay per key channel, not one per head.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    value_dim: int = 128
    shared: int = 1
    update_rule: str = "gated_delta"
    per_key: int = 0
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self, update_rule=RULES)
        if self.per_key and self.update_rule not in GATED:
            raise ConfigError(f"per_key={self.per_key}: update_rule={self.update_rule!r} has no decay.")

    @property
    def decay(self) -> int:
        """As the kernels have it: 0 none, 1 per head, 2 per key."""
        return 0 if self.update_rule not in GATED else 1 + bool(self.per_key)

    def table(self, arch: int) -> TileTable:
        """Block sizes on an architecture."""
        delta = self.update_rule in DELTA
        return tile_table(arch, self.head_dim, self.value_dim, self.shared, delta, bool(self.per_key), self.dtype)


def constants_of(variant: Variant) -> dict[str, Any]:
    """Compile-time constants by name; each kernel takes those that it declares."""
    import triton

    interpreted = bool(triton.knobs.runtime.interpret)
    wide = variant.dtype == "float32"
    return {
        "D": variant.head_dim,
        "DP": pow2(variant.head_dim),
        "V": variant.value_dim,
        "G": variant.shared,
        "DELTA": int(variant.update_rule in DELTA),
        "DECAY": variant.decay,
        "RAGGED": 0,
        "PAGE": 0,
        "NARROW": int(variant.dtype == "float16"),
        "SETTLE": int(not interpreted),
        "WIDE": int(wide),
        "DOT": "tf32x3" if wide else "tf32",
    }


def plan_constants(table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    scan, output, decode = (table.tiles[name].constants for name in ("scan", "output", "decode"))
    blocks = {
        "value_block": scan["BV"],
        "key_block": scan["BD"],
        "output_block": output["BV"],
        "decode_block": decode["BV"],
    }
    return {"chunk": scan["C"], **blocks, **table.host}


def absent(variant: Variant) -> frozenset[str]:
    """Pointers that calls of a variant do not have."""
    names: set[str] = set()
    if variant.update_rule not in DELTA:
        names |= {"beta", "inverse", "taken", "new"}
    if variant.dtype != "float16":
        names |= {"unit"}
    per_key = {"scores", "asked", "taken", "added"}
    names |= ({"decay", "left", "rest", *per_key}, per_key, {"rest"})[variant.decay]
    return frozenset(names)


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    table = variant.table(arch) if table is None else table
    return Build(table.kernels(), constants_of(variant), plan_constants(table), absent(variant))


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=combinations(Variant),
    build=build,
    functions=imported("still_kernels.linear_attention.functions", "FUNCTIONS"),
    covered=(
        Check(f"dtype in {DTYPES}", f"dtype={{dtype}}; the kernels have {', '.join(DTYPES)}."),
        Check(f"D <= {MAX_HEAD_DIM}", f"head_dim={{D}}; the kernels have at most {MAX_HEAD_DIM}."),
        Check(f"G <= {MAX_SHARED}", f"{{G}} query heads share a state; the kernels have at most {MAX_SHARED}."),
    ),
)
