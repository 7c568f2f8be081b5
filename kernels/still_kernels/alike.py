"""What kernels of the GPU ask of a state's type."""

from __future__ import annotations

from torch import Tensor

from still_graphs.errors import UnsupportedError


def demand_alike(activation: Tensor, kept: Tensor) -> None:
    """Raise UnsupportedError where a state is kept in another type than the activations'."""
    if kept.dtype != activation.dtype:
        raise UnsupportedError(
            f"keys and values are kept in {kept.dtype} beside {activation.dtype}, which kernels of the GPU do not read. "
            "Run on the CPU, or without `cache`."
        )
