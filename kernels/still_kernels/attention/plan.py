"""The launches of still::Attention: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.attention import ATTENTION
from still_kernels.plan import Branch, Check, Launch, Plan, Region

DECODE = "T == 1 or T * (H // HK) <= 32"
"""So few tokens that the cache, not the GEMMs, is what a call waits for."""

PLAN = Plan(
    ATTENTION,
    key={"dtype": "dtype", "head_dim": "D", "cache": "cache", "count_dtype": "count_dtype"},
    constants=(
        "attend_rows",  # tokens of one program of prefill
        "decode_rows",  # tokens times heads of a group, of one program of decode
        "decode_programs",  # that fill the chip
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
        # Programs that share the cache of one key/value head; a sequence that has filled less of it uses fewer.
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
