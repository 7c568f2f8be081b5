"""still::HybridAttention: STILL's hybrid of softmax over salient tokens and linear attention over all others, in one layer."""

from __future__ import annotations

from still_graphs.spec import CACHE, AttributeSpec, Growth, OpSpec, StateSpec, TensorSpec, scales_of
from still_kernels.attention.spec import COUNTS, HEADS, OUTPUT

SLOTS = Growth("slots", 2, "salient_per_chunk", "chunk_size", lag=2, only=("overflow", "error"))
"""The salient tokens of a chunk are copied into the cache when the second chunk after it begins."""

_WINDOW_KEY = StateSpec("window_key", ("B", "HK", "2*C", "D"), "T", narrow=True)
_WINDOW_VALUE = StateSpec("window_value", ("B", "HK", "2*C", "D"), "T", narrow=True)
_SALIENT_KEY = StateSpec("salient_key", ("B", "HS", "N", "D"), "T", SLOTS, narrow=True)
_SALIENT_VALUE = StateSpec("salient_value", ("B", "HS", "N", "D"), "T", SLOTS, narrow=True)

HYBRID_ATTENTION = OpSpec(
    # Symbols: HS heads of the salient cache (H, or HK with select_scope kv_group_*), P rows of a feature projection, F feature dim,
    # C chunk size.
    name="HybridAttention",
    torch_name="hybrid_attention",
    inputs=(
        *HEADS,
        TensorSpec("gate", ("B", "T", "H", "D"), "T", "activation", optional=True),
        TensorSpec("feature_q_weight", ("H", "P", "D"), "T", "weight"),
        TensorSpec("feature_k_weight", ("H", "P", "D"), "T", "weight"),
        TensorSpec("window_factor", ("H",), "float32", "weight", optional=True),
        *COUNTS,
    ),
    # In place, in either branch of the body: each state has one writer, and nothing reads the past state after the write.
    # Short branch: ScatterND writes rings in place, and readers use its output; the other states pass through Identity, which
    # does not copy a buffer to itself. General branch: rings, S and z are first copied into larger tensors, and new values are
    # computed from these copies; ScatterND writes cached rows from the concatenation that read the cache. Without a promotion it
    # writes no row.
    states=(
        _WINDOW_KEY,
        _WINDOW_VALUE,
        StateSpec("window_score", ("B", "H", "2*C"), "float32"),
        _SALIENT_KEY,
        _SALIENT_VALUE,
        StateSpec("kv_state", ("B", "H", "F", "D"), "float32"),
        StateSpec("z_state", ("B", "H", "F"), "float32", features=True),
        *map(scales_of, (_WINDOW_KEY, _WINDOW_VALUE, _SALIENT_KEY, _SALIENT_VALUE)),
    ),
    outputs=(OUTPUT,),
    attributes=(
        AttributeSpec("chunk_size", 64),
        AttributeSpec("salient_per_chunk", 4),
        AttributeSpec("select_scope", "q_head", ("q_head", "kv_group_max", "kv_group_mean")),
        AttributeSpec("saliency", "margin", ("margin", "released_prefill")),
        AttributeSpec(
            "feature_map",
            "np_softmax_pm",
            ("np_softmax_pm", "softmax_pm", "softmax", "relu", "elu_plus_one", "identity"),
        ),
        AttributeSpec("local", "chunked", ("chunked", "sliding")),
        AttributeSpec("window_size", 0),  # tokens of a sliding window; 0 = chunk_size
        AttributeSpec("mix_epsilon", 1e-6),
        AttributeSpec("phantom_first_chunk", 0),
        AttributeSpec("overflow", "error", ("error", "fold_oldest")),
        CACHE,
    ),
)
