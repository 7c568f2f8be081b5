"""still::StridedAttention: softmax attention to the last token of each earlier chunk and to the token itself."""

from __future__ import annotations

from dataclasses import replace

from still_graphs.spec import AttributeSpec, Growth, OpSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

CHUNK_ROWS = Growth("chunk_rows", 2, per="row_tokens")
"""Chunk j of a sequence is row j of its cache."""

STRIDED_ATTENTION = OpSpec(
    # A token at position p reads rows up to p // row_tokens - 1, with scale 1 / sqrt(D), and its own key and value. It then overwrites row
    # p // row_tokens, as the next token of its chunk does.
    name="StridedAttention",
    torch_name="strided_attention",
    inputs=(*HEADS, *COUNTS),
    # In place: rows are gathered before they are written; written values are read from the writer's output.
    states=tuple(replace(state, growth=CHUNK_ROWS) for state in KEY_AND_VALUE),
    outputs=(OUTPUT,),
    attributes=(AttributeSpec("row_tokens", 16),),
)
