"""The launches of still::LinearAttention: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.linear_attention import DELTA, GATED, LINEAR_ATTENTION
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region

DECODE = "T <= 8"
"""So few tokens that reading and writing the state, not the GEMMs, is what a call waits for."""
PER_KEY = "(E > 1 if has(decay) else 0)"
_CHUNKS = f"not ({DECODE})"
_OF_KEYS = f"{_CHUNKS} and {PER_KEY}"
_OF_HEADS = f"{_CHUNKS} and has(decay) and not {PER_KEY}"
_PREPARED = "(has(decay) or has(beta))"
_CORRECTED = f"{_CHUNKS} and has(beta)"

_STEP = (Launch("decode", ("ceil_div(V, decode_block)", "H", "B")),)
_PART = {"first": "first", "n_chunks": "n_chunks"}  # the chunks of a segment
_SEGMENT = (
    Let("n_chunks", "min(segment_chunks, chunks - first)"),
    Launch("prepare", (f"n_chunks if {_PREPARED} else 0", "H", "B"), **_PART),
    Launch("scan", ("ceil_div(V, value_block) * ceil_div(D, key_block)", "H", "B"), **_PART),
    Launch("output", ("n_chunks * ceil_div(V, output_block)", "H", "B"), **_PART),
)

PLAN = Plan(
    LINEAR_ATTENTION,
    key={
        "dtype": "dtype",
        "head_dim": "D",
        "value_dim": "V",
        "shared": "G",
        "update_rule": "update_rule",
        "per_key": PER_KEY,
        "count_dtype": "count_dtype",
    },
    constants=(
        "chunk",  # tokens of a chunk
        "segment_chunks",  # that workspace is for
        "value_block",  # columns of the state of one program of a prompt's scan
        "key_block",  # and its rows
        "output_block",  # and of its outputs
        "decode_block",  # and of a step
    ),
    checks=(
        Check("HQ > 0 and H % max(HQ, 1) == 0", "HQ={HQ} query groups do not divide the H={H} heads of value."),
        Check("HK > 0 and H % max(HK, 1) == 0", "HK={HK} key heads do not divide the H={H} heads of value."),
        Check(
            f"has(decay) == (update_rule in {GATED})", "update_rule={update_rule}: decay is for gated and gated_delta."
        ),
        Check(
            f"has(beta) == (update_rule in {DELTA})", "update_rule={update_rule}: beta is for delta and gated_delta."
        ),
        Check("not has(decay) or E == 1 or E == D", "decay has E={E} values a head; expected 1 or D={D}."),
        Check("not has(beta) or W == 1 or W == H", "beta has W={W} heads; expected 1 or H={H}."),
    ),
    define={"chunks": "ceil_div(T, chunk)", "span": "min(chunks, segment_chunks)", "wide": "dtype == 'float32'"},
    types={"halves": "'float32' if dtype == 'float32' else 'bfloat16'"},
    workspace=(
        Region("scores", "T", ("B", "span", "H", "G", "chunk", "chunk"), _OF_KEYS),
        Region("inverse", "halves", ("B", "span", "H", "1 if wide else 2", "chunk", "chunk"), _CORRECTED),
        Region("left", "float32", ("B", "span", "H", f"D if {PER_KEY} else chunk"), f"{_CHUNKS} and has(decay)"),
        Region("rest", "float32", ("B", "span", "H", "chunk"), _OF_HEADS),
        Region("asked", "T", ("B", "span", "H", "G", "chunk", "D"), _OF_KEYS),
        Region("taken", "T", ("B", "span", "H", "chunk", "D"), f"{_OF_KEYS} and has(beta)"),
        Region("added", "T", ("B", "span", "H", "chunk", "D"), _OF_KEYS),
        Region("before", "T", ("B", "span", "H", "V", "D"), _CHUNKS),
        Region("unit", "float32", ("B", "span", "H", "V"), f"{_CHUNKS} and dtype == 'float16'"),
        Region("new", "T", ("B", "span", "H", "V", "chunk"), _CORRECTED),
    ),
    arguments={
        **{name: name for name in ("T", "H", "HQ", "HK")},
        "W": "W if has(beta) else 1",
        "scale": "scale if scale != 0 else rsqrt(D)",
    },
    steps=(Branch(DECODE, _STEP, (Loop("first", "0", "chunks", "segment_chunks", _SEGMENT),)),),
)
