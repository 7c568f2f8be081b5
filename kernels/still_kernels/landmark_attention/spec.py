"""still::LandmarkAttention: softmax attention to blocks by way of a landmark, the last token of each."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

LANDMARK_ATTENTION = OpSpec(
    # A token sees those of its own block up to itself but for the landmark, and the landmarks of the blocks before it, in one softmax; what
    # a landmark has of that is shared by its block's other tokens, in a softmax among them. No landmark's value counts. Scale 1 / sqrt(D).
    name="LandmarkAttention",
    torch_name="landmark_attention",
    inputs=(*HEADS, *COUNTS),
    # In place, as of still::Attention.
    states=KEY_AND_VALUE,
    outputs=(OUTPUT,),
    attributes=(AttributeSpec("block_tokens", 51),),
)
