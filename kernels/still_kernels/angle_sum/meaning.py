"""The definition of still::AngleSum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.angle_sum.spec import ANGLE_SUM, TURN
from still_kernels.sizes import sizes_of_call
from still_kernels.torch_ops import traced_op


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call (see the op's spec), fp16, bf16, fp32 or fp64."""

    angle: Tensor
    step: Tensor
    new_tokens: Tensor


def naive_angle_sum(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Angles from 0 to below 2 pi [B, T, H, A], 0 at padding, in at least float32; and the state after the call.

    Args:
        state: Cosine less 1 and sine of the angles so far, [B, H, A, 2].
    """
    sizes, wide = sizes_of_call(ANGLE_SUM, inputs, angle_state=state), inputs.step.dtype
    if state.dtype != wide:
        raise ShapeError(f"state: expected {wide}, got {state.dtype}.")
    real = torch.arange(sizes["T"], device=state.device) < inputs.new_tokens[:, None]
    turned = 0.5 * inputs.angle.to(wide).tanh()[:, :, None] * inputs.step[..., None]
    turned = torch.where(real[..., None, None], turned, 0.0)
    whole = (turned.detach() * TURN).round().to(torch.int64).cumsum(1)
    places = torch.atan2(state[..., 1], state[..., 0] + 1).detach() / (2 * math.pi)
    before = (places * TURN).round().to(torch.int64)
    share = ((before[:, None] + whole) % TURN).to(wide) / TURN
    # Derivatives are those of the sum.
    share = share + (turned.cumsum(1) - turned.cumsum(1).detach())
    angles = share * (2 * math.pi)
    last = angles[:, -1] if sizes["T"] else places * (2 * math.pi)
    after = torch.stack((last.cos() - 1, last.sin()), -1)
    after = torch.where((inputs.new_tokens > 0)[:, None, None, None], after, state)
    return torch.where(real[..., None, None], angles, 0.0), after


angle_sum = traced_op(ANGLE_SUM, Inputs)(naive_angle_sum)
"""The same, one node where a program is traced."""
