"""still::StridedAttention: softmax attention to the last token of each chunk before a token's own, and to the token itself."""

from __future__ import annotations

from still_graphs.ops.spec import AttributeSpec, Growth, OpSpec, StateSpec, TensorSpec

CHUNK_ROWS = Growth("chunk_rows", 2, per="row_tokens")
"""Chunk j of a sequence lies in row j of its cache."""

STRIDED_ATTENTION = OpSpec(
    # A token at position p sees rows up to p // row_tokens - 1, scale 1 / sqrt(D), and beside them its own key and value. It then takes row
    # p // row_tokens, which the next token of its chunk takes from it.
    name="StridedAttention",
    torch_name="strided_attention",
    inputs=(
        TensorSpec("query", ("B", "T", "H", "D"), "T", "activation"),
        TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("value", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
        TensorSpec("past_length", ("B",), "int64", "count"),
    ),
    # In place: rows are gathered before they are written, and what is written is read from the writer's output.
    states=(
        StateSpec("key", ("B", "HK", "N", "D"), "T", CHUNK_ROWS, narrow=True),
        StateSpec("value", ("B", "HK", "N", "D"), "T", CHUNK_ROWS, narrow=True),
    ),
    outputs=(TensorSpec("output", ("B", "T", "H", "D"), "T", "activation"),),
    attributes=(AttributeSpec("row_tokens", 16),),
)
