"""Requirement of GPU kernels on a state's type."""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError


def demand_alike(activation: Tensor, state: Tensor) -> None:
    """Raise UnsupportedError if a state has another float type than the activations."""
    if state.dtype not in (activation.dtype, torch.int32):
        raise UnsupportedError(
            f"keys and values are kept in {state.dtype} beside {activation.dtype}, which kernels of the GPU do not read. "
            "Run on the CPU, or without `cache`."
        )
