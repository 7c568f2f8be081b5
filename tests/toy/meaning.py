"""The meaning of still::Decay in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_decay(value: Tensor, new_tokens: Tensor, total: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D], 0 at padding, and the state [B, H, D] after the rows' new tokens."""
    total, outputs = total.clone(), []
    for step in range(value.shape[1]):
        real = (step < new_tokens)[:, None, None]
        total = torch.where(real, decay * total + value[:, step], total)
        outputs.append(torch.where(real, total, torch.zeros_like(total)))
    return torch.stack(outputs, 1).to(value.dtype), total
