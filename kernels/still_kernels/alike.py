"""A check of GPU kernels on a state's type."""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError


def demand_alike(activation: Tensor, kept: Tensor) -> None:
    """Raise UnsupportedError if a state of numbers has another type than the activations."""
    if kept.dtype not in (activation.dtype, torch.int32):
        raise UnsupportedError(
            f"keys and values are kept in {kept.dtype} beside {activation.dtype}, which kernels of the GPU do not read. "
            "Run on the CPU, or without `cache`."
        )
