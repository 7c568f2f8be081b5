"""The meaning of still::Decay in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.torch_ops import traced_op
from tests.toy.spec import DECAY


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call, as of the op's spec."""

    value: Tensor
    new_tokens: Tensor
    past_length: Tensor
    decay: float = 0.5


@traced_op(DECAY, Inputs)
def decay(inputs: Inputs, total: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D], 0 at padding, and the state [B, H, D] after the rows' new tokens."""
    total, outputs = total.clone(), []
    for step in range(inputs.value.shape[1]):
        real = (step < inputs.new_tokens)[:, None, None]
        total = torch.where(real, inputs.decay * total + inputs.value[:, step], total)
        outputs.append(torch.where(real, total, torch.zeros_like(total)))
    return torch.stack(outputs, 1).to(inputs.value.dtype), total
