"""The definition: the weight as numbers, then a product. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.matmul_nbits.inputs import WORD_BITS, Inputs


def dequantized(inputs: Inputs) -> Tensor:
    """The weight scale * (code - zero point) + offset [O, I], rounded to the type of the activations."""
    inputs.check()
    outputs, blocks = inputs.scales.shape
    shifts = torch.arange(0, WORD_BITS, inputs.bits, dtype=torch.int32, device=inputs.blocks.device)
    most = (1 << inputs.bits) - 1
    codes = (inputs.blocks[..., None] >> shifts & most).view(outputs, blocks, inputs.block_size)
    zero: Tensor | int = 1 << (inputs.bits - 1)
    if inputs.zero_points is not None:
        zero = (inputs.zero_points[..., None] >> shifts & most).view(outputs, -1)[:, :blocks, None]
    wide = torch.promote_types(inputs.scales.dtype, torch.float32)
    weight = (codes - zero).to(wide) * inputs.scales.to(wide)[..., None]
    if inputs.offsets is not None:
        weight += inputs.offsets.to(wide)[..., None]
    return weight.to(inputs.scales.dtype).view(outputs, -1)


def naive_matmul_nbits(inputs: Inputs) -> Tensor:
    """Tokens times the transposed weight, in at least float32.

    Returns:
        [B, T, O], dtype of input.

    Raises:
        ShapeError: A tensor does not fit.
    """
    weight = dequantized(inputs)
    wide = torch.promote_types(inputs.input.dtype, torch.float32)
    return (inputs.input.to(wide) @ weight.to(wide).T).to(inputs.input.dtype)
