"""still::BlockAttention: causal softmax attention with a cache, of each token to the blocks that were chosen for it."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

BLOCK_ATTENTION = OpSpec(
    # A token at position p sees the positions up to p whose block is among its `blocks`, which name none twice; -1 is none. Several nodes
    # may read the same blocks.
    name="BlockAttention",
    torch_name="block_attention",
    inputs=(
        *HEADS,
        TensorSpec("blocks", ("B", "T", "HK", "S"), "int32", "activation"),
        *COUNTS,
    ),
    # In place, like still::Attention.
    states=KEY_AND_VALUE,
    outputs=(OUTPUT,),
    attributes=(AttributeSpec("block_size", 64),),
)
