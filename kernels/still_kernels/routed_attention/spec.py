"""still::RoutedAttention: the gated delta rule over chunks of which some are taken back, for softmax attention to read."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec
from still_kernels.attention.spec import COUNTS

ROUTED_CHUNK = 64
"""Tokens of a chunk."""

_KEYS, _STATE = ("B", "T", "H", "D"), ("B", "H", "D", "V")

ROUTED_ATTENTION = OpSpec(
    # R routes, each of H / R neighbouring heads. What a chunk goes to is known at its last token: where `softmax` is 1 there, the rule's
    # state becomes what it was before the chunk, decayed over it with `keep_decay`; inside the chunk the rule runs in any case. Scale
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
    # In place: what is written of either matrix comes after all reads of both.
    states=(
        StateSpec("routed_state", _STATE, "float32"),
        StateSpec("chunk_state", _STATE, "float32"),  # before the open chunk
    ),
    outputs=(TensorSpec("output", ("B", "T", "H", "V"), "T", "activation"),),
    attributes=(AttributeSpec("keep_decay", 1),),
)
