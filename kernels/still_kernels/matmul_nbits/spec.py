"""still::MatMulNBits: a product with a 4- or 8-bit weight in blocks, for targets without an op of their own."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

SUPER, TILE = 256, 8
"""Inputs whose block scales share a number, with super_block; and the number of interleaved outputs."""
WORDS, NUMBERS = {4: 36, 6: 52}, {4: 2, 6: 1}
"""Words and numbers for SUPER inputs of an output, by bits."""

MATMUL_NBITS = OpSpec(
    # Symbols: I inputs, O outputs; IW, IS, IZ words of codes, scales and words of zero points of an output.
    # The bytes of codes and zero points are those of com.microsoft::MatMulNBits, four in a word, the first one lowest, because TensorRT
    # plugins support no bytes. Zero points of an output are padded to whole words. Without them the code of 0 is `zero_code`; -1 means
    # the middle.
    #
    # With super_block=256 a weight is GGUF's Q4_K (bits=4, blocks of 32) or Q6_K (bits=6, blocks of 16), bit for bit: scales of blocks
    # are integers times a number for 256 inputs. Eight outputs are interleaved, so that a processor's lanes are outputs and a weight is
    # one stream. For each group of eight outputs and each 256 inputs there are, in words:
    #   Q4_K: scales [8 blocks, 8 outputs] and offsets to subtract [8, 8], in bytes, the first one lowest; codes [8 blocks, 4, 8 outputs],
    #         those of 8 inputs in each word at bits 0, 8, 16, 24, 4, 12, 20, 28. `scales`: the numbers of the scales [8], then of the
    #         offsets [8].
    #   Q6_K: signed scales [16 blocks, 8 outputs] in bytes; for each of 16 blocks the low four bits of codes [2, 8 outputs] as above, then
    #         the high two [8 outputs], those of input i at bit i % 4 * 8 + i / 4 * 2; code 32 is 0. `scales`: [8].
    name="MatMulNBits",
    torch_name="matmul_nbits",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("blocks", ("O", "IW"), "int32", "weight"),
        TensorSpec("scales", ("O", "IS"), "T", "weight", narrow=True),
        TensorSpec("zero_points", ("O", "IZ"), "int32", "weight", optional=True),
        TensorSpec("offsets", ("O", "IS"), "T", "weight", optional=True, narrow=True),
    ),
    outputs=(TensorSpec("output", ("B", "T", "O"), "T", "activation"),),
    attributes=(
        AttributeSpec("bits", 4),
        AttributeSpec("block_size", 32),
        AttributeSpec("zero_code", -1),
        AttributeSpec("super_block", 0),
    ),
    traced=False,
)
