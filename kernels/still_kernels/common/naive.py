"""What definitions of several ops share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


def naive_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Each token [.., I] over its root mean square, times weight [I]; computed in `dtype`, rounded to the type of x."""
    return rms_norm(x.to(dtype), weight.shape, weight.to(dtype), epsilon).to(x.dtype)


def naive_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads side by side, x [B, T, heads * D], each rotated by the angles of its token, [B, T, D]."""
    heads = x.unflatten(2, (-1, cos.shape[2]))
    first, second = heads.chunk(2, -1)
    return (heads * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]).flatten(2)


def naive_gate(x: Tensor) -> Tensor:
    """silu(gate) * up [.., M] of x [.., 2 * M], gates first."""
    gate, up = x.chunk(2, -1)
    return silu(gate) * up
