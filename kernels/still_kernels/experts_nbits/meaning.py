"""The definition of still::ExpertsNBits: still::Experts with the matrices as numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.experts.meaning import Inputs as Dense
from still_kernels.experts.meaning import naive_experts
from still_kernels.experts_nbits.spec import EXPERTS_NBITS
from still_kernels.sizes import sizes_of_call


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call (see the op's spec); without zero points codes are around the middle of the grid."""

    input: Tensor
    expert: Tensor
    weight: Tensor
    gate_up: Tensor
    gate_up_scales: Tensor
    down: Tensor
    down_scales: Tensor
    gate_up_zero_points: Tensor | None = None
    down_zero_points: Tensor | None = None
    activation: str = "swiglu"
    bits: int = 4
    block_size: int = 32

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        sizes_of_call(EXPERTS_NBITS, self)

    def dequantized(self, name: str) -> Tensor:
        """`gate_up` or `down` as numbers of the activations' type, [E, rows, columns]."""
        scales, zero = getattr(self, f"{name}_scales"), getattr(self, f"{name}_zero_points")
        codes = _codes(getattr(self, name), self.bits).unflatten(-1, (scales.shape[-1], -1))
        middle = 1 << (self.bits - 1) if zero is None else _codes(zero, self.bits)[..., : scales.shape[-1], None]
        return ((codes - middle) * scales.float()[..., None]).flatten(-2).to(self.input.dtype)


def naive_experts_nbits(inputs: Inputs) -> Tensor:
    """The weighted sum of the experts of each token, [B, T, I], dtype of input."""
    inputs.check()
    gate_up, down = (inputs.dequantized(name) for name in ("gate_up", "down"))
    return naive_experts(Dense(inputs.input, inputs.expert, inputs.weight, gate_up, down, inputs.activation))


def _codes(words: Tensor, bits: int) -> Tensor:
    """Codes of words along the last axis, the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
