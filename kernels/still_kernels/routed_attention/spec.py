"""still::RoutedAttention: the gated delta rule over chunks, some of which are reverted because softmax attention reads them."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec
from still_kernels.attention.spec import COUNTS

ROUTED_CHUNK = 64
"""Tokens of a chunk."""

_KEYS, _STATE = ("B", "T", "H", "D"), ("B", "H", "D", "V")

ROUTED_ATTENTION = OpSpec(
    # R routes, each of H / R neighbouring heads. A chunk's route is known at its last token: if `softmax` is 1 there, the rule's
    # state returns to its value before the chunk, decayed over it with `keep_decay`. Inside the chunk the rule always runs. Scale is
    # 1 / sqrt(D).
    name="RoutedAttention",
    torch_name="routed_attention",
    inputs=(
        TensorSpec("query", _KEYS, "T", "activation"),
        TensorSpec("key", _KEYS, "T", "activation"),
        TensorSpec("value", ("B", "T", "H", "V"), "T", "activation"),
        TensorSpec("decay", ("B", "T", "H"), "float32", "activation"),
        TensorSpec("beta", ("B", "T", "H"), "float32", "activation"),
        TensorSpec("softmax", ("B", "T", "R"), "int32", "activation"),
        *COUNTS,
    ),
    # In place: writes to either matrix come after all reads of both.
    states=(
        StateSpec("routed_state", _STATE, "float32"),
        StateSpec("chunk_state", _STATE, "float32"),  # before the open chunk
    ),
    outputs=(TensorSpec("output", ("B", "T", "H", "V"), "T", "activation"),),
    attributes=(AttributeSpec("keep_decay", 1),),
)
