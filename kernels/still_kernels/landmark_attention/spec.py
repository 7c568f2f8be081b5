"""still::LandmarkAttention: softmax attention to blocks through a landmark, the last token of each."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

LANDMARK_ATTENTION = OpSpec(
    # A token has one softmax over the earlier tokens of its own block and itself, except the landmark, and over the landmarks of earlier
    # blocks. A second softmax among a block's other tokens distributes the landmark's share. Landmarks' values do not count. Scale is
    # 1 / sqrt(D).
    # With `top_blocks` = k a head of a token reads only k of the o earlier blocks: those with the largest landmark logits, the lower index
    # first if equal. Queries and keys then come without RoPE, which the op applies (by halves, base `rope_base`). For the choice, landmarks
    # of the latest k blocks have their own positions, and older ones the position of block o - k - 1. For attention, the j-th of the k
    # chosen blocks in order has the position of block o - k + j, and older blocks are one block before that.
    name="LandmarkAttention",
    torch_name="landmark_attention",
    inputs=(*HEADS, *COUNTS),
    # In place, like still::Attention.
    states=KEY_AND_VALUE,
    outputs=(OUTPUT,),
    attributes=(AttributeSpec("block_tokens", 51), AttributeSpec("top_blocks", 0), AttributeSpec("rope_base", 10000.0)),
)
