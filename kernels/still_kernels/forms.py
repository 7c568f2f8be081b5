"""Whether ops run by their kernels: they do on GPUs, unless the reference is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_asked = 0


def has_kernels(device: torch.device) -> bool:
    """Whether ops on this device run by kernels, instead of in PyTorch."""
    return device.type != "cpu" and not _asked


@contextmanager
def pytorch_forms() -> Iterator[None]:
    """Inside the block, ops run in PyTorch on every device."""
    global _asked
    _asked += 1
    try:
        yield
    finally:
        _asked -= 1
