"""What the kernels of still::SelectBlocks are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from still_kernels.op_kernels import DTYPES, Build, OpKernels, check_known, combinations, imported
from still_kernels.plan import Check
from still_kernels.select_blocks.plan import PLAN
from still_kernels.select_blocks.tiles import MAX_HEAD_DIM, tile_table
from still_kernels.tile import TileTable, pow2

PARTS = {"float32": 1, "float16": 2, "bfloat16": 3}
"""Numbers of the activations' type that a mean in float32 is the sum of, to 22 bits at least."""


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    group: Query heads of a key/value head, filled up to a power of two.
    block_size and the rest: As of the op's spec.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    group: int = 16
    block_size: int = 64
    mean_stride: int = 16
    mean_length: int = 32
    lse_stride: int = 64
    lse_length: int = 128
    top_blocks: int = 96
    init_blocks: int = 1
    local_blocks: int = 32
    dense_length: int = 8192
    block_slots: int = 128
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self)


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    import triton

    v, wide = variant, variant.dtype == "float32"
    table = tile_table(arch, v.head_dim, v.group, wide) if table is None else table
    few, many = (table.tiles[name].constants for name in ("score_few", "score"))
    # Coarse means that lie in the sums of one tile.
    means = (table.tiles["multiply"].constants["BJ"] - v.lse_length // v.mean_stride) // (
        v.lse_stride // v.mean_stride
    ) + 1
    constants: dict[str, Any] = {
        "D": v.head_dim,
        "DP": pow2(v.head_dim),
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
        "PARTS": PARTS[v.dtype],
        "DOT": "tf32x3" if wide else "tf32",
        "MEANS": means,
        "MP": pow2(means),
        "SETTLE": int(not triton.knobs.runtime.interpret),
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
    functions=imported("still_kernels.select_blocks.triton_select", "FUNCTIONS"),
    covered=(
        Check(f"dtype in {DTYPES}", f"dtype={{dtype}}; the kernels have {', '.join(DTYPES)}."),
        Check(f"D <= {MAX_HEAD_DIM}", f"head_dim={{D}}; the kernels have at most {MAX_HEAD_DIM}."),
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
