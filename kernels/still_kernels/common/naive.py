"""Parts of the PyTorch definitions of several ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


def naive_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """RMS norm of each token [.., I] with weight [I], computed in `dtype` and rounded to the type of x."""
    return rms_norm(x.to(dtype), weight.shape, weight.to(dtype), epsilon).to(x.dtype)


def naive_gate(x: Tensor) -> Tensor:
    """silu(gate) * up [.., M] for x [.., 2 * M], gates first."""
    gate, up = x.chunk(2, -1)
    return silu(gate) * up
