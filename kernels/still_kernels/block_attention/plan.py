"""Kernels of still::BlockAttention: launches, block sizes, what they are compiled for. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.op_kernels import HEAD_DIM, TYPES, check_known, combinations, constants_of_heads, op_with_state
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, for_two_programs, pow2

MOST_PARTS = 64
"""Programs that share a token's blocks: one loads their results side by side."""
DECODE_PROGRAMS = 264
"""That fill the chip: two on each multiprocessor of an H200."""
SPAN_TOKENS = 8192
"""Of a prompt, whose tiles are united at once: 17 MB for tiles of four tokens beside 65,536."""


@lru_cache
def tile_table(arch: int, head_dim: int, block: int, wide: bool) -> TileTable:
    """The table of one variant on an architecture (90 for sm_90), blocks of so many keys; wide: float32 activations."""
    dim = pow2(head_dim)
    small = SHARED_BYTES.get(arch, 99 << 10) < (160 << 10)
    row_bytes = dim * (4 if wide else 2)
    keys = min(pow2(block), 16 if row_bytes > 512 else 32 if row_bytes > 256 else 64)
    stages = 2 if small or row_bytes > 256 else 3
    # 32 keys at a time leave no room for two programs either where shared memory is small.
    ahead = stages if wide else for_two_programs(SHARED_BYTES.get(arch, 99 << 10), dim, keys, stages)[1]
    dependent = arch >= 90
    pdl = {"PDL": int(dependent)}
    tiles = {
        "append": KernelTile({"BT": 16, **pdl}, 4, 1, None, dependent),
        "decode": KernelTile({"BR": 16, "BN": keys, "STAGES": stages, **pdl}, 4, stages, None, dependent),
        "merge": KernelTile({"BS": MOST_PARTS, **pdl}, 4, 1, None, dependent),
        "unite": KernelTile({"BC": 512}, 4, 1),
        # H100, 65,536 tokens that choose alike: 64 rows and 4 warps 25.4 ms, 128 and 8, which read half the bytes, 30.3.
        "attend": KernelTile({"BM": 64, "BN": keys, "STAGES": ahead}, 4, ahead),
    }
    return TileTable(tiles, {"decode_programs": DECODE_PROGRAMS, "span_tokens": SPAN_TOKENS})


FEW = "T <= 8"
"""So few tokens that each goes through its own blocks."""
_MANY = f"not ({FEW})"
_OWN = {"first": "first", "span": "count"}

PLAN = Plan(
    BLOCK_ATTENTION,
    key={
        "dtype": "dtype",
        "head_dim": "D",
        "slots": "pow2(S)",
        "block_size": "block_size",
        "count_dtype": "count_dtype",
    },
    constants=(
        "append_tokens",
        "decode_heads",  # of one program
        "decode_programs",  # that fill the chip
        "most_parts",
        "attend_rows",  # tokens times heads of a group, of one program of a prompt
        "span_tokens",  # of a prompt that workspace is for
    ),
    checks=(
        Check("HK > 0 and H % max(HK, 1) == 0", "query has H={H} heads, which is no multiple of HK={HK} of key."),
        Check("T * HK * D < 2147483648", "T={T} tokens in one call; offsets among their keys have 32 bits."),
    ),
    define={
        "pieces": "ceil_div(H // HK, decode_heads)",
        "parts": "max(1, min(min(S, most_parts), ceil_div(decode_programs, B * HK * T * pieces)))",
        # Of a tile; their bits have 32.
        "tile_tokens": "max(1, min(32, attend_rows // max(1, H // HK)))",
        "span": "min(T, ceil_div(span_tokens, tile_tokens) * tile_tokens)",
        "tiles": "ceil_div(span, tile_tokens)",
        "united_blocks": "min(tile_tokens * S, ceil_div(N, block_size))",
    },
    workspace=(
        Region("part_acc", "float32", ("B", "T", "H", "parts", "D"), FEW),
        Region("part_ml", "float32", ("B", "T", "H", "parts", 2), FEW),
        Region("united", "int32", ("B", "tiles", "HK", "united_blocks"), _MANY),
        Region("readers", "int32", ("B", "tiles", "HK", "united_blocks"), _MANY),
        Region("many", "int32", ("B", "tiles", "HK", 2), _MANY),
    ),
    arguments={
        **{name: name for name in ("T", "H", "HK", "N", "S")},
        "NS": "parts",
        "U": "united_blocks",
        "TOKENS": "tile_tokens",
        "scale": "rsqrt(D)",
    },
    steps=(
        Launch("append", ("ceil_div(T, append_tokens)", "HK", "B")),
        Branch(
            FEW,
            (Launch("decode", ("parts", "HK * T * pieces", "B")), Launch("merge", ("H", "T", "B"))),
            (
                Loop(
                    "first",
                    "0",
                    "T",
                    "span",
                    (
                        Let("count", "min(span, T - first)"),
                        Launch("unite", ("ceil_div(count, tile_tokens)", "HK", "B"), **_OWN),
                        Launch("attend", ("ceil_div(count, tile_tokens)", "HK", "B"), **_OWN),
                    ),
                ),
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    slots: Blocks of a token's list, filled up to a power of two.
    block_size: As of the op's spec.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    slots: int = 128
    block_size: int = 64
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self)


def constants_of(variant: Variant) -> dict[str, Any]:
    return {
        **constants_of_heads(variant),
        "SP": variant.slots,
        "BLOCK": variant.block_size,
        "BP": 1 << (variant.block_size - 1).bit_length(),
    }


OP = op_with_state(
    PLAN,
    Variant,
    combinations(Variant),
    lambda variant, arch: tile_table(arch, variant.head_dim, variant.block_size, variant.dtype == "float32"),
    constants_of,
    module="still_kernels.block_attention.kernels",
    blocks={
        "append_tokens": "append.BT",
        "decode_heads": "decode.BR",
        "most_parts": "merge.BS",
        "attend_rows": "attend.BM",
    },
    covered=(
        TYPES,
        HEAD_DIM,
        Check("H // HK <= 64", "{H // HK} query heads of a key/value head; the kernels have at most 64."),
    ),
)
KERNELS = OP.kernels
