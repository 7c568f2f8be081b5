"""What definitions of several ops share."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Each token [.., I] over its root mean square, times weight [I]; in at least float32, rounded to the type of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (scaled * weight.to(wide.dtype)).to(x.dtype)
