"""Rows of a state in 8 bits, in PyTorch; see `still_graphs.spec.CACHE`."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 127
"""Codes are -STEPS .. STEPS."""
LEAST = 1e-30
"""Replaces a magnitude of 0; divided by STEPS it is still a normal number."""


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] of any float type as words int32 [..., D / 4] and scales float32 [...]."""
    wide = rows.float()
    scale = _parts(wide.abs().amax(-1))
    codes = torch.round(wide / torch.where(scale > 0, scale, 1)[..., None])
    return codes.to(torch.int8).contiguous().view(torch.int32), scale


def dequantized(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows [..., D] that such words and scales hold."""
    if (
        words.stride(-1) != 1
    ):  # of a part of a state, or where a row is one word; a view of bytes wants them side by side
        words = words.clone(memory_format=torch.contiguous_format)
    return (words.view(torch.int8) * scale[..., None].float()).to(dtype)


def rounded(rows: Tensor) -> Tensor:
    """Rows [..., D] quantized and dequantized, in their own type; traced as standard ops."""
    wide = rows.float()
    scale = _parts(wide.abs().amax(-1, keepdim=True).clamp_min(LEAST))
    return (torch.round(wide / scale) * scale).to(rows.dtype)


def _parts(largest: Tensor) -> Tensor:
    # By a tensor: by a number CUDA multiplies with the reciprocal, which is not the rule.
    return largest / torch.full_like(largest, STEPS)
