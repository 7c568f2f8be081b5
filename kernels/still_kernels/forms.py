"""Choice between kernels and PyTorch implementations of ops. On a GPU the default is kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_depth = 0


def has_kernels(device: torch.device) -> bool:
    """Whether ops on this device use kernels rather than PyTorch."""
    return device.type != "cpu" and not _depth


@contextmanager
def pytorch_forms() -> Iterator[None]:
    """Context in which every device uses the PyTorch implementations."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
