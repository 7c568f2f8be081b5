"""What a product with a weight in blocks reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.errors import ShapeError
from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from still_kernels.sizes import check

WORD_BITS = 32


@dataclass(frozen=True)
class Inputs:
    """Tokens and weight of one call.

    input: [B, T, I].
    blocks: Codes of [O, I], WORD_BITS / bits in a word, the first one lowest, int32 [O, I * bits / WORD_BITS].
    scales: One for each block, of the type of input, [O, I / block_size].
    zero_points: The codes of 0, those of an output in whole words, int32 [O, ceil(I / block_size * bits / WORD_BITS)]; None: the middle,
        2^(bits - 1).
    offsets: Added to the numbers of each block, of the type and shape of the scales; None: 0.
    bits: 4 or 8.
    block_size: Inputs that share a scale.
    """

    input: Tensor
    blocks: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    bits: int = 4
    block_size: int = 32
    offsets: Tensor | None = None

    def check(self) -> None:
        """Raise ShapeError naming the tensor or attribute that does not fit."""
        if self.bits not in (4, 8) or self.block_size < 1:
            raise ShapeError(f"bits={self.bits}, block_size={self.block_size}: expected 4 or 8 bits, and blocks.")
        if self.input.dim() != 3 or self.input.shape[2] % self.block_size:
            raise ShapeError(f"input: expected [B, T, a multiple of {self.block_size}], got {list(self.input.shape)}.")
        inputs = self.input.shape[2]
        blocks = inputs // self.block_size
        words, zeros = inputs * self.bits // WORD_BITS, -(-blocks * self.bits // WORD_BITS)
        check(MATMUL_NBITS, self, IW=words, IS=blocks, IZ=zeros)
