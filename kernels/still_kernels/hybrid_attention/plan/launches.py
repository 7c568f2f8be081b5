"""The launches of still::HybridAttention; still_kernels.plan explains the parts. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.plan import Alias, Branch, Check, Launch, Let, Loop, Matrix, Plan, Region

DECODE, PREFILL, FOLDS = "T == 1", "T != 1", "overflow != 'error'"
FLAGGED = f"{PREFILL} or {FOLDS}"
UNPACKED = f"{PREFILL} and unpack_rows > 0"
CACHED = "(B if unpack_rows > 0 else rows) * HS * N"

# Sums over features use tensor cores in bfloat16 for either 16-bit type: float16 would overflow.
LINEAR = "'float32' if dtype == 'float32' else 'bfloat16'"

PART = {"first_tile": "first", "n_tiles": "count"}  # the chunks of a segment

# Heads of a cluster, and clusters of a step. With two heads a cluster reads one row's long caches no faster than the other kernel.
CLUSTERED = "decode_clusters > 0 and (select_scope == 'q_head' or H // HK % 2 == 0 and (B > 1 or N <= 2048))"


def _clusters(blocks: int) -> tuple[Launch, ...]:
    return (Launch(f"decode_{blocks}", (f"heads * {blocks}", "B", "1")),)


DECODE_STEPS = (
    Branch(
        "folds",
        (
            Launch("select", ("1", "HS", "B"), first_tile="0"),
            Launch("features", ("1", "H", "B"), first_tile="0", n_tiles="1"),
            Launch("scan", ("scan_programs", "H", "B"), first_tile="0", n_tiles="1", store_prefix="0"),
        ),
    ),
    Branch(
        CLUSTERED,
        (
            Let("heads", "H if select_scope == 'q_head' else H // 2"),
            Branch("B * heads <= 64", _clusters(8), (Branch("B * heads <= 160", _clusters(2), _clusters(1)),)),
        ),
        (Launch("decode", ("H // HS * (value_slices + window_parts + 1) + splits", "HS", "B")),),
    ),
)
LINEAR_TILES = "min(linear_programs, ceil_div(count, 2) * H * B)"
ATTEND_TILES = "min(attend_programs, ceil_div(count * C, attend_rows) * H * B)"
SEGMENT_STEPS = (
    Let("count", "min(segment, tiles - first)"),
    # the cache is right for one chunk at a time
    Branch("folds", (Launch("select", ("1", "HS", "B"), first_tile="first"),)),
    Launch("features", ("ceil_div(count, features_tiles)", "H", "B"), **PART),
    Branch(
        "scan_tma > 0",
        (Launch("scan_tma", ("scan_programs", "H", "B"), **PART),),
        (Launch("scan", ("scan_programs", "H", "B"), **PART, store_prefix="1"),),
    ),
    Branch(
        "linear_programs > 0",
        (Launch("linear_tma", (LINEAR_TILES, "1", "1"), **PART),),
        (Launch("linear", ("ceil_div(count * C, linear_rows)", "H", "B"), **PART),),
    ),
    Branch(
        "attend_programs > 0",
        (Launch("attend_tma", (ATTEND_TILES, "1", "1"), **PART),),
        (Launch("attend", ("ceil_div(count * C, attend_rows)", "H", "B"), **PART),),
    ),
)
PREFILL_STEPS = (
    Launch("score", ("tiles * score_blocks_per_chunk", "HK", "B")),
    Branch("not folds", (Launch("select", ("tiles", "HS", "B"), first_tile="0"),)),
    Branch("unpack_rows > 0", (Launch("unpack", ("ceil_div(N, unpack_rows) + 2 * C // unpack_rows", "HS", "B")),)),
    Loop("first", "0", "tiles", "segment", SEGMENT_STEPS),
    Launch("commit", ("H", "B", "1")),
)

PLAN = Plan(
    HYBRID_ATTENTION,
    key={
        "dtype": "dtype",
        "head_dim": "D",
        "chunk_size": "chunk_size",
        "feature_rows": "P",
        "feature_map": "feature_map",
        "gate": "has(gate)",
        "select_scope": "select_scope",
        "saliency": "saliency",
        "overflow": "overflow",
        "window_factor": "has(window_factor)",
        "cache": "cache",
        "count_dtype": "count_dtype",
    },
    constants=(
        "segment_tiles",  # chunks of a segment; the workspace has features and partial sums of one segment
        "score_blocks_per_chunk",
        "features_tiles",  # chunks of one program
        "scan_programs",  # share S of one head
        "scan_tma",  # 1: the scan that copies by TMA
        "prefix_every",  # chunks from one stored S to the next
        "linear_rows",
        "attend_rows",
        "attend_programs",  # share the tiles of attend_rows queries; 0: one program per tile
        "linear_programs",  # the same for linear, with tiles of two chunks
        "unpack_rows",  # rows that a program dequantizes from an 8-bit state for TMA kernels; 0: kernels read codes
        "decode_clusters",  # 1: steps by clusters of blocks; 0: decode
        "value_slices",  # slices of S in decode
        "window_parts",  # parts of the ring in decode
        "decode_programs",  # number that fills the chip
        "evicted_rows",  # most rows that a folding policy moves out of the cache at once
    ),
    checks=(
        Check("chunk_size == C", "past_window_key holds 2*C={2 * C} tokens, chunk_size is {chunk_size}."),
        Check("HK > 0 and H % max(HK, 1) == 0", "query has H={H} heads, which is no multiple of HK={HK} of key."),
        Check(
            "HS == (H if select_scope == 'q_head' else HK)",
            "past_salient_key has {HS} heads; select_scope={select_scope} needs {H if select_scope == 'q_head' else HK}.",
        ),
        Check(
            "F == (2 * P if feature_map in ('np_softmax_pm', 'softmax_pm') else P)",
            "past_kv_state has F={F} features; feature_map={feature_map} makes "
            "{2 * P if feature_map in ('np_softmax_pm', 'softmax_pm') else P} of P={P}.",
        ),
        Check(
            "overflow == 'error' or N % max(salient_per_chunk, 1) == 0",
            "past_salient_key has {N} slots; overflow={overflow} needs a multiple of salient_per_chunk={salient_per_chunk}.",
        ),
        Check(
            "has(salient_key_scale) == (cache == 'int8')",
            "past_salient_key_scale goes with cache=int8 alone; cache={cache}.",
        ),
        Check(
            "local == 'chunked'",
            'local="{local}" has no kernel; the kernels have "chunked". Export for onnxruntime, which runs the function body.',
        ),
    ),
    define={
        "folds": FOLDS,
        "tiles": "(T + C - 2) // C + 1",  # most chunks that T new tokens touch, for any start
        "segment": "1 if folds else min(segment_tiles, tiles)",
        "stored": "ceil_div(segment, prefix_every)",
        # Programs that share the salient cache of one select head: enough to fill the chip, each with at least 32 slots. At most 24:
        # with the parts of the window one block of the merge then reads all of them. Long caches are shared among more, up to 2,048 in
        # all: a program without a slot in use takes as long as a wave, 17 us of 217 with 64 rows of 32 heads at 1K of 68K.
        "fill": "ceil_div(decode_programs, B * HS)",
        "even": "min(ceil_div(N, 512), ceil_div(2048, B * HS))",
        "splits": "max(1, min(ceil_div(N, 32), max(fill, even), 24)) if N > 0 else 1",
        "parts": "splits + window_parts + 1",
        "evicted": "evicted_rows if folds else 0",
    },
    types={"linear": LINEAR},
    workspace=(
        Region("score", "float32", ("tokens", "H"), PREFILL),
        Region("prefix_kv", "linear", ("B", "stored", "H", "F", "D"), PREFILL),
        Region("prefix_z", "float32", ("B", "stored", "H", "F"), PREFILL),
        Region("linear", "linear", ("B", "segment", "H", "C", "D"), PREFILL),
        Region("linear_sum", "float32", ("B", "segment", "H", "C"), PREFILL),
        Region("ring_key", "T", ("B", "HK", "2 * C", "D"), UNPACKED),
        Region("ring_value", "T", ("B", "HK", "2 * C", "D"), UNPACKED),
        Region("cached_key", "T", ("B", "HS", "N", "D"), UNPACKED),
        Region("cached_value", "T", ("B", "HS", "N", "D"), UNPACKED),
        Region("part_acc", "float32", ("B", "H", "parts", "D"), DECODE),
        Region("part_ml", "float32", ("B", "H", "parts", 2), DECODE),
        Region("part_window", "float32", ("B", "H", "window_parts", 4), DECODE),
        Region("part_lin", "float32", ("B", "H", "D"), DECODE),
        Region("part_den", "float32", ("B", "H"), DECODE),
        # named by the kernels, not written in decode
        Region("prefix_kv", "linear", (16,), f"{DECODE} and folds"),
        Region("prefix_z", "float32", (16,), f"{DECODE} and folds"),
        Region("flags", "int8", ("B", "tiles + 2", "HS", "C"), FLAGGED),
        Region("phi_k", "linear", ("B", "segment", "H", "C + evicted", "F"), FLAGGED),
        Region("evicted_key", "T", ("B", "HS", "evicted", "D"), FOLDS),
        Region("evicted_value", "T", ("B", "HS", "evicted", "D"), FOLDS),
        Region("evicted_count", "int32", ("B", "HS"), FOLDS),
    ),
    persistent=(Region("counters", "int32", ("B", "2 * H"), DECODE),),  # arrivals of programs
    aliases=(
        Alias("score", "window_score", DECODE),  # never read: the chunk that a step promotes is in the ring
        Alias("ring_key", "window_key", "unpack_rows == 0"),
        Alias("ring_value", "window_value", "unpack_rows == 0"),
        Alias("cached_key", "salient_key", "unpack_rows == 0"),
        Alias("cached_value", "salient_value", "unpack_rows == 0"),
    ),
    matrices=(
        Matrix("query", "tokens", "H * D"),
        Matrix("key", "tokens", "HK * D"),
        Matrix("value", "tokens", "HK * D"),
        Matrix("gate", "tokens", "H * D"),
        Matrix("output", "tokens", "H * D"),
        Matrix("cached_key", CACHED, "D"),
        Matrix("cached_value", CACHED, "D"),
        Matrix("linear", "B * segment * H * C", "D"),
        Matrix("feature_q_weight", "dim(feature_q_weight, 0) * P", "D"),
        Matrix("phi_k", "B * segment * H * (C + evicted)", "F"),
        Matrix("prefix_kv", "B * stored * H * F", "D"),
    ),
    arguments={
        **{name: name for name in ("B", "T", "H", "HK", "HS", "N")},
        "G": "H // HK",
        "K": "salient_per_chunk",
        "W_HEADS": "dim(feature_q_weight, 0)",
        "R": "tiles + 2",
        "NS": "splits",
        "phantom": "phantom_first_chunk",
        "scale": "rsqrt(D)",
        "epsilon": "mix_epsilon",
    },
    steps=(Branch(DECODE, DECODE_STEPS, PREFILL_STEPS),),
)
