"""Kernels of still::SelectBlocks: launches, block sizes, variants. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from still_kernels.op_kernels import (
    HEAD_DIM,
    TYPES,
    Build,
    Op,
    OpKernels,
    check_known,
    combinations,
    constants_of_heads,
    imported,
)
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region
from still_kernels.select_blocks.spec import SELECT_BLOCKS, Choice
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, pow2

FEW_PROGRAMS = 264
"""Number of programs that fills the chip: two on each multiprocessor of an H200."""
SPAN_TOKENS = 2048
"""Tokens whose scores are stored at once: 67 MB at 65,536 tokens with two key/value heads."""


@lru_cache
def tile_table(arch: int, head_dim: int, group: int, wide: bool) -> TileTable:
    """The table of a variant on an architecture (90 for sm_90); group: query heads of a key/value head, wide: float32 activations."""
    dependent = arch >= 90
    pdl = {"PDL": int(dependent)}
    means = 32 if pow2(head_dim) * (2 if wide else 1) > 128 else 64
    # H100, a prompt of 65,536 tokens of MiniCPM-SALA's layer: 128 rows with 8 warps take 20.5 ms, 64 with 4 take 28.7 ms.
    # Two stages leave room for two programs on a multiprocessor: one's exponentials overlap the other's products.
    small = SHARED_BYTES.get(arch, 99 << 10) < (160 << 10)
    rows, warps = (64, 4) if wide or (small and head_dim > 128) else (128, 8)
    stages = 1 if small else 2
    few = max(16, group)
    tiles = {
        "add": KernelTile(pdl, 4, 1, None, dependent),
        "multiply": KernelTile({"BM": few, "BJ": means, "STAGES": 2, **pdl}, 4, 2, None, dependent),
        "mean": KernelTile({"BJ": means}, 4, 1),
        "normalize": KernelTile({"BM": rows, "BJ": means, "STAGES": stages}, warps, stages),
        "score": KernelTile({"BM": rows, "BJ": means, "BS": 32, "STAGES": stages, "KEPT": 0, "PDL": 0}, warps, stages),
        "choose": KernelTile({"BC": 1024, "PDL": 0}, 4, 1),
        # At most BS parts of the normalizer: each program loads them at once.
        "score_few": KernelTile(
            {"BM": few, "BJ": 128, "BS": 128, "STAGES": 1, "KEPT": 1, **pdl}, 4, 1, None, dependent
        ),
        "choose_few": KernelTile({"BC": 4096, **pdl}, 8, 1, None, dependent),
    }
    return TileTable(tiles, {"few_programs": FEW_PROGRAMS, "span_tokens": SPAN_TOKENS})


FEW = "T <= 8"
"""So few tokens that reading the sums dominates, not the GEMMs."""
SCORED = "top_blocks > init_blocks + local_blocks + 1"


def _steps(few: str, first: str, count: str) -> tuple[Launch, ...]:
    """Steps that compute scores and choices of `count` tokens from `first`."""
    own = {"first": first, "chunk": "span"}
    tiles = f"HK * ceil_div({count}, {'few' if few else 'many'}_tokens)"
    grid = (f"parts if {SCORED} else 0", tiles, "B")
    return (
        Launch("multiply", grid) if few else Launch("normalize", grid, first=first),
        Launch(f"score{few}", (f"splits if {SCORED} else 0", tiles, "B"), **own),
        Launch(f"choose{few}", (count, "HK", "B"), **own),
    )


PLAN = Plan(
    SELECT_BLOCKS,
    key={
        "dtype": "dtype",
        "head_dim": "D",
        "group": "pow2(H // HK)",
        **{a.name: a.name for a in SELECT_BLOCKS.attributes},
        "count_dtype": "count_dtype",
    },
    constants=(
        "few_tokens",  # tokens of a step's program
        "many_tokens",  # tokens of a prompt's program
        "few_programs",  # number that fills the chip
        "few_parts",  # parts of a normalizer
        "many_parts",
        "mean_parts",  # numbers whose sum is one mean
        "mean_rows",  # sums of a program
        "few_rows",  # queries of a program
        "many_rows",
        "span_tokens",  # tokens of a prompt that workspace is sized for
    ),
    checks=(
        Check("HK > 0 and H % max(HK, 1) == 0", "query has H={H} heads, which is no multiple of HK={HK} of key."),
        Check("N * D < 2147483648", "the state has N={N} rows of D={D}; offsets in one head of it have 32 bits."),
    ),
    define={
        "span": f"T if {FEW} else min(T, span_tokens)",
        "tiles": f"ceil_div(span, few_tokens if {FEW} else many_tokens)",
        "fill": "ceil_div(few_programs, B * HK * tiles)",
        # Programs that share the means of one tile of tokens.
        "splits": "max(1, min(ceil_div(N, 64), fill))",
        "parts": f"min(splits, few_parts if {FEW} else many_parts)",
        # Stored means, fine and coarse, with room after them: up to 128 are read at a time.
        "NM": "ceil_div(N, 128) * 128",
        "NC": "ceil_div(N * mean_stride, 128 * lse_stride) * 128",
        "NB": "ceil_div(ceil_div(N * mean_stride, block_size), 4) * 4",
    },
    workspace=(
        Region("part_ml", "float32", ("B", "HK * tiles", "parts", f"few_rows if {FEW} else many_rows", 2), SCORED),
        Region("product", "float32", ("B", "HK * tiles", "few_rows", "N"), f"{SCORED} and {FEW}"),
        Region("mean", "T", ("B", "HK", "mean_parts", "NM", "D"), f"{SCORED} and not ({FEW})"),
        Region("coarse", "T", ("B", "HK", "mean_parts", "NC", "D"), f"{SCORED} and not ({FEW})"),
        Region("best", "float32", ("B", "span", "HK", "NB"), SCORED),
        Region("tail", "float32", ("B", "span", "HK", "NB"), SCORED),
    ),
    arguments={
        **{name: name for name in ("T", "H", "HK", "N", "NM", "NC", "NB")},
        "S": "block_slots",
        "NS": "parts",
        "scale": "rsqrt(D)",
    },
    steps=(
        Launch("add", ("(T + 2 * mean_stride - 2) // mean_stride", "HK", "B")),
        Branch(
            FEW,
            _steps("_few", "0", "T"),
            (
                Launch("mean", (f"ceil_div(N, mean_rows) if {SCORED} else 0", "HK", "B")),
                Loop(
                    "first",
                    "0",
                    "T",
                    "span",
                    (Let("count", "min(span, T - first)"), *_steps("", "first", "count")),
                ),
            ),
        ),
    ),
)


PARTS = {"float32": 1, "float16": 2, "bfloat16": 3}
"""Numbers of the activations' type whose sum is a float32 mean, to at least 22 bits."""


@dataclass(frozen=True)
class Variant(Choice):
    """Properties that a set of kernels is compiled for; everything else is a run-time argument.

    group: Query heads of a key/value head, rounded up to a power of two.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    group: int = 16
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self)


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """The `Build` of a variant on an architecture, optionally with other block sizes."""
    v = variant
    table = tile_table(arch, v.head_dim, v.group, v.dtype == "float32") if table is None else table
    few, many = (table.tiles[name].constants for name in ("score_few", "score"))
    # Coarse means within the sums of one tile.
    means = (table.tiles["multiply"].constants["BJ"] - v.lse_length // v.mean_stride) // (
        v.lse_stride // v.mean_stride
    ) + 1
    constants: dict[str, Any] = {
        **constants_of_heads(v),
        "GP": v.group,
        "BLOCK": v.block_size,
        "STRIDE": v.mean_stride,
        "SP": 1 << (v.block_slots - 1).bit_length(),
        "KP": 1 << (v.mean_stride - 1).bit_length(),
        "LENGTH": v.mean_length,
        "LSE_STRIDE": v.lse_stride,
        "LSE_LENGTH": v.lse_length,
        "TOP": v.top_blocks,
        "INIT": v.init_blocks,
        "LOCAL": v.local_blocks,
        "DENSE": v.dense_length,
        "BY_CALL": v.switch_by_call,
        "PARTS": PARTS[v.dtype],
        "MEANS": means,
        "MP": pow2(means),
    }
    sizes = {"mean_parts": PARTS[v.dtype], "mean_rows": table.tiles["mean"].constants["BJ"]}
    for name, of in (("few", few), ("many", many)):
        sizes |= {f"{name}_rows": of["BM"], f"{name}_tokens": of["BM"] // v.group, f"{name}_parts": of["BS"]}
    return Build(table.kernels(), constants, {**sizes, **table.host})


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=combinations(Variant),
    build=build,
    functions=imported("still_kernels.select_blocks.kernels", "FUNCTIONS"),
    covered=(
        TYPES,
        HEAD_DIM,
        Check("H // HK <= 64", "{H // HK} query heads of a key/value head; the kernels have at most 64."),
        Check(
            " or ".join(f"block_size == {n} * mean_stride" for n in (1, 2, 4, 8, 16, 32)),
            "block_size={block_size} beside mean_stride={mean_stride}; the kernels have a power of two up to 32 of sums in a block.",
        ),
        Check(
            "mean_length <= block_size + mean_stride",
            "mean_length={mean_length}; the kernels have means of at most block_size={block_size} keys and one sum more.",
        ),
        Check(
            "lse_length <= 32 * mean_stride",
            "lse_length={lse_length}; the kernels have coarse means of at most 32 sums of mean_stride={mean_stride} keys.",
        ),
    ),
)


OP = Op(KERNELS)
