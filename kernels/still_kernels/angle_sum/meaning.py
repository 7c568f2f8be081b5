"""The definition of still::AngleSum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.angle_sum.spec import ANGLE_SUM, TURN
from still_kernels.sizes import sizes_of, tensors_of


@dataclass(frozen=True)
class Inputs:
    """Tokens and counts of one call; fp16, bf16, fp32 or fp64.

    angle: Before tanh, of all heads, [B, T, A].
    step: Of each head, [B, T, H], in at least float32.
    new_tokens: Tokens that each sequence brings, the rest of its T is padding, int [B].
    """

    angle: Tensor
    step: Tensor
    new_tokens: Tensor


def naive_angle_sum(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Angles from 0 to below 2 pi [B, T, H, A], 0 at padding, in at least float32; and the state after the call.

    Args:
        state: Cosine less 1 and sine of the angles so far, [B, H, A, 2].

    Raises:
        ShapeError: A tensor does not fit.
    """
    sizes = sizes_of(ANGLE_SUM, {name: x.shape for name, x in tensors_of(inputs).items()})
    shape, wide = [*(sizes[n] for n in "BHA"), 2], inputs.step.dtype
    if list(state.shape) != shape or state.dtype != wide:
        raise ShapeError(f"state: expected {shape} of {wide}, got {list(state.shape)} of {state.dtype}.")
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
