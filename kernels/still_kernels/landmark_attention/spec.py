"""still::LandmarkAttention: softmax attention to blocks by way of a landmark, the last token of each."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

LANDMARK_ATTENTION = OpSpec(
    # A token sees those of its own block up to itself but for the landmark, and the landmarks of the blocks before it, in one softmax; what
    # a landmark has of that is shared by its block's other tokens, in a softmax among them. No landmark's value counts. Scale 1 / sqrt(D).
    # With `top_blocks` = k a head of a token reads k of the o blocks before its own alone, those of the largest landmark logits, of equal
    # ones the lower index. Queries and keys come before positions then, which the op gives them (RoPE by halves, base `rope_base`):
    # landmarks of the latest k blocks have their own, older ones those of block o - k - 1, for the choice. What is read lies at the place
    # of block o - k + j, the j-th of the k in order, and older blocks one block before that.
    name="LandmarkAttention",
    torch_name="landmark_attention",
    inputs=(*HEADS, *COUNTS),
    # In place, like still::Attention.
    states=KEY_AND_VALUE,
    outputs=(OUTPUT,),
    attributes=(AttributeSpec("block_tokens", 51), AttributeSpec("top_blocks", 0), AttributeSpec("rope_base", 10000.0)),
)
