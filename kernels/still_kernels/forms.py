"""Whether ops run by their kernels: on a GPU they do, but for who asks for what is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_asked = 0


def has_kernels(device: torch.device) -> bool:
    """Whether ops on this device run by kernels; else by their forms in PyTorch."""
    return device.type != "cpu" and not _asked


@contextmanager
def pytorch_forms() -> Iterator[None]:
    """With the forms in PyTorch on every device."""
    global _asked
    _asked += 1
    try:
        yield
    finally:
        _asked -= 1
