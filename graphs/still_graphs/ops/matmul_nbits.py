"""still::MatMulNBits: a product with a weight of 4 or 8 bits in blocks, for targets that have none of their own."""

from __future__ import annotations

from still_graphs.ops.spec import AttributeSpec, OpSpec, TensorSpec

MATMUL_NBITS = OpSpec(
    # Symbols: I inputs, O outputs; IW, IS, IZ words of codes, scales and words of zero points of an output.
    # The bytes of codes and zero points are those of com.microsoft::MatMulNBits, four in a word, the first one lowest: plugins of
    # TensorRT take no bytes. Zero points of an output are filled up to whole words; without them the code of 0 is `zero_code`, or where
    # that is -1 the middle.
    name="MatMulNBits",
    torch_name="matmul_nbits",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("blocks", ("O", "IW"), "int32", "weight"),
        TensorSpec("scales", ("O", "IS"), "T", "weight", narrow=True),
        TensorSpec("zero_points", ("O", "IZ"), "int32", "weight", optional=True),
        TensorSpec("offsets", ("O", "IS"), "T", "weight", optional=True, narrow=True),
    ),
    states=(),
    outputs=(TensorSpec("output", ("B", "T", "O"), "T", "activation"),),
    attributes=(AttributeSpec("bits", 4), AttributeSpec("block_size", 32), AttributeSpec("zero_code", -1)),
    traced=False,
)
