"""still::KeptAttention: causal softmax attention whose cache has only the retained chunks and the open one."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, Growth, OpSpec, StateSpec, TensorSpec
from still_kernels.attention.spec import COUNTS, HEADS, OUTPUT

_KEPT_ROWS = Growth("kept_rows", 2, "chunk_size", "chunk_size", counted="kept_chunks")
_ROWS = ("B", "HK", "N", "D")

KEPT_ATTENTION = OpSpec(
    # R routes, each of HK / R neighbouring key/value heads. A token reads its own chunk up to itself, and the earlier chunks that its
    # route retains. A route retains a chunk if `keep` is 1 at the chunk's last token. The retained chunks of a route are the first
    # `kept_chunks` of its cache, in order. The open chunk follows, then zeros. A sequence with k retained chunks and p tokens in its open
    # chunk needs chunk_size k + p + new_tokens rows.
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
