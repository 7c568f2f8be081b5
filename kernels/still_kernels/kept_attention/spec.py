"""still::KeptAttention: causal softmax attention with a cache that keeps chosen chunks and the open one alone."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, Growth, OpSpec, StateSpec, TensorSpec
from still_kernels.attention.spec import COUNTS, HEADS, OUTPUT

_KEPT_ROWS = Growth("kept_rows", 2, "chunk_size", "chunk_size", counted="kept_chunks")
_ROWS = ("B", "HK", "N", "D")

KEPT_ATTENTION = OpSpec(
    # R routes, each of HK / R neighbouring key/value heads. A token sees its own chunk up to itself, and of the chunks before it those
    # that its route keeps. Whether one is kept is known at its last token: where `keep` is 1 there. The kept chunks of a route are the
    # first `kept_chunks` of its cache, in order, the open chunk is behind them, and zeros are behind it. A sequence with k of these and p
    # tokens in its open chunk needs chunk_size k + p + new_tokens rows.
    name="KeptAttention",
    torch_name="kept_attention",
    inputs=(*HEADS, TensorSpec("keep", ("B", "T", "R"), "int32", "activation"), *COUNTS),
    # In place: rows that are written are gathered before.
    states=(
        StateSpec("key", _ROWS, "T", _KEPT_ROWS, narrow=True),
        StateSpec("value", _ROWS, "T", _KEPT_ROWS, narrow=True),
        StateSpec("kept_chunks", ("B", "R"), "float32"),
    ),
    outputs=(OUTPUT,),
    attributes=(AttributeSpec("chunk_size", 64),),
)
