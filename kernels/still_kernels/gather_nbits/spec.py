"""still::GatherNBits: rows of an embedding in GGUF's Q4_K or Q6_K, in the layout of still::MatMulNBits."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

GATHER_NBITS = OpSpec(
    # Symbols and layout of `blocks` and `scales`: see MatMulNBits with super_block=256; a head may read the same bytes.
    name="GatherNBits",
    torch_name="gather_nbits",
    inputs=(
        TensorSpec("indices", ("B", "T"), "int64", "count"),
        TensorSpec("blocks", ("O", "IW"), "int32", "weight"),
        TensorSpec("scales", ("O", "IS"), "T", "weight", narrow=True),
    ),
    outputs=(TensorSpec("output", ("B", "T", "I"), "T", "activation"),),
    attributes=(AttributeSpec("bits", 6),),
    traced=False,
)
