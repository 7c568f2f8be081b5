"""Choice between kernels and PyTorch implementations of ops. On a GPU the default is kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_asked = 0


def has_kernels(device: torch.device) -> bool:
    """Whether ops on this device use kernels rather than PyTorch."""
    return device.type != "cpu" and not _asked


@contextmanager
def pytorch_forms() -> Iterator[None]:
    """Context in which every device uses the PyTorch implementations."""
    global _asked
    _asked += 1
    try:
        yield
    finally:
        _asked -= 1
