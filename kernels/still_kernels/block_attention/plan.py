"""The launches of still::BlockAttention: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region

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
