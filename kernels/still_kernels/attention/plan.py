"""Kernels of still::Attention: launches, block sizes, variants. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from still_graphs.spec import CACHE
from still_kernels.attention.spec import ATTENTION
from still_kernels.op_kernels import HEAD_DIM, TYPES, check_known, combinations, constants_of_heads, op_with_state
from still_kernels.plan import Branch, Check, Launch, Plan, Region
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, for_two_programs, pow2

DECODE_ROWS = 16
"""Query rows of a decode program: the minimum of a matrix instruction."""
MOST_SPLITS = 64
"""Most programs that share the cache of one key/value head; the last one merges all results at once."""
DECODE_PROGRAMS = 264
"""Number of programs that fills the chip: two on each multiprocessor of an H200."""


@lru_cache
def tile_table(arch: int, head_dim: int, wide: bool) -> TileTable:
    """The table of a variant on an architecture (90 for sm_90); wide: float32 activations."""
    dim = pow2(head_dim)
    small = SHARED_BYTES.get(arch, 99 << 10) < (160 << 10)
    row_bytes = dim * (4 if wide else 2)
    # Keys and values of a stage: as many stages as fit next to the queries.
    keys = 16 if row_bytes > 512 else 32 if row_bytes > 256 else 64
    # H200, head size 128, 8,192 tokens: 64 rows with 4 warps take 1.15 ms (478 TFLOP/s), 128 with 8 take 1.27 to 1.56 ms.
    rows = 16 if row_bytes > 512 and small else 32 if wide or dim > 128 else 64
    stages = 2 if small or row_bytes > 256 else 3
    near, ahead = (keys, stages) if wide else for_two_programs(SHARED_BYTES.get(arch, 99 << 10), dim, keys, stages)
    tiles = {
        "attend": KernelTile({"BM": rows, "BN": min(near, rows), "STAGES": ahead}, 4, ahead),
        "decode": KernelTile({"BR": DECODE_ROWS, "BN": keys, "BS": MOST_SPLITS, "STAGES": stages}, 4, stages),
    }
    return TileTable(tiles, {"decode_programs": DECODE_PROGRAMS})


DECODE = "T == 1 or T * (H // HK) <= 32"
"""So few tokens that reading the cache dominates, not the GEMMs."""

PLAN = Plan(
    ATTENTION,
    key={"dtype": "dtype", "head_dim": "D", "cache": "cache", "count_dtype": "count_dtype"},
    constants=(
        "attend_rows",  # tokens of a prefill program
        "decode_rows",  # tokens times heads of a group, of a decode program
        "decode_programs",  # number that fills the chip
        "most_splits",
    ),
    checks=(
        Check("HK > 0 and H % max(HK, 1) == 0", "query has H={H} heads, which is no multiple of HK={HK} of key."),
        Check("has(key_scale) == (cache == 'int8')", "past_key_scale goes with cache=int8 alone; cache={cache}."),
        Check("N * D < 2147483648", "the state has N={N} rows of D={D}; offsets in one head of it have 32 bits."),
        Check("T * HK * D < 2147483648", "T={T} tokens in one call; offsets among their keys have 32 bits."),
    ),
    define={
        "blocks": "ceil_div(T * (H // HK), decode_rows)",
        "fill": "ceil_div(decode_programs, B * HK * blocks)",
        # Programs that share the cache of one key/value head; a sequence with a shorter cache uses fewer.
        "splits": "max(1, min(min(ceil_div(N, 128), fill), most_splits))",
    },
    workspace=(
        Region("part_acc", "float32", ("B", "HK * blocks", "splits", "decode_rows", "D"), DECODE),
        Region("part_ml", "float32", ("B", "HK * blocks", "splits", "decode_rows", 2), DECODE),
    ),
    persistent=(Region("counters", "int32", ("B", "HK * blocks"), DECODE),),  # arrivals of programs
    arguments={**{name: name for name in ("T", "H", "HK", "N")}, "NS": "splits", "scale": "rsqrt(D)"},
    steps=(
        Branch(
            DECODE,
            (Launch("decode", ("splits", "HK * blocks", "B")),),
            (Launch("attend", ("ceil_div(T, attend_rows)", "H", "B")),),
        ),
    ),
    measured_tokens=(1, "max(1, 32 // max(1, H // HK))"),
)


@dataclass(frozen=True)
class Variant:
    """Properties that a set of kernels is compiled for; everything else is a run-time argument."""

    dtype: str = "bfloat16"
    head_dim: int = 128
    cache: str = "float"
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self, cache=CACHE.choices)


OP = op_with_state(
    PLAN,
    Variant,
    combinations(Variant, head_dim=(64, 128)),
    lambda variant, arch: tile_table(arch, variant.head_dim, variant.dtype == "float32"),
    lambda variant: {**constants_of_heads(variant), "CODES": int(variant.cache == "int8")},
    module="still_kernels.attention.kernels",
    blocks={"attend_rows": "attend.BM", "decode_rows": "decode.BR", "most_splits": "decode.BS"},
    absent=lambda variant: ("key_scale", "value_scale") if variant.cache == "float" else (),
    covered=(TYPES, HEAD_DIM),
)
KERNELS = OP.kernels
