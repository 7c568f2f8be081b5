"""still::BlockAttention: causal softmax attention with a cache, of each token to the blocks that were chosen for it."""

from __future__ import annotations

from still_graphs.ops.attention import CAPACITY
from still_graphs.ops.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec

BLOCK_ATTENTION = OpSpec(
    # A token at position p sees the positions up to p whose block is among its `blocks`, which name none twice; -1 is none. Several nodes
    # may read the same blocks.
    name="BlockAttention",
    torch_name="block_attention",
    inputs=(
        TensorSpec("query", ("B", "T", "H", "D"), "T", "activation"),
        TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("value", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("blocks", ("B", "T", "HK", "S"), "int32", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
        TensorSpec("past_length", ("B",), "int64", "count"),
    ),
    # In place, as of still::Attention.
    states=(
        StateSpec("key", ("B", "HK", "N", "D"), "T", CAPACITY, narrow=True),
        StateSpec("value", ("B", "HK", "N", "D"), "T", CAPACITY, narrow=True),
    ),
    outputs=(TensorSpec("output", ("B", "T", "H", "D"), "T", "activation"),),
    attributes=(AttributeSpec("block_size", 64),),
)
