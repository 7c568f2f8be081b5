"""8-bit rows of a state in PyTorch, by the rule of `still_graphs.spec.CACHE`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

STEPS = 127
"""Codes are in -STEPS .. STEPS."""
LEAST = 1e-30
"""Replaces a magnitude of 0; divided by STEPS it is still a normal number."""


_near: tuple[float, torch.Generator] | None = None


@contextmanager
def near_codes(width: float, generator: torch.Generator) -> Iterator[None]:
    """Context in which a number at most `width` from halfway between two codes, or two numbers of a narrower float type, gets either, at
    random: those of another runtime."""
    global _near
    before, _near = _near, (width, generator)
    try:
        yield
    finally:
        _near = before


def _nearest(x: Tensor) -> Tensor:
    if _near is None:
        return torch.round(x)
    width, generator = _near
    moved = (2 * torch.rand(x.shape, generator=generator) - 1).to(x) * width
    return torch.round(x + moved)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a narrower float type."""
    if _near is not None:
        width, generator = _near
        moved = (2 * torch.rand(x.shape, generator=generator) - 1).to(x) * width
        x = x + moved * torch.finfo(dtype).eps * x.abs()
    return x.to(dtype)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] of any float type as words int32 [..., D / 4] and scales float32 [...]."""
    wide = rows.float()
    scale = _parts(wide.abs().amax(-1))
    codes = _nearest(wide / torch.where(scale > 0, scale, 1)[..., None])
    return codes.to(torch.int8).contiguous().view(torch.int32), scale


def dequantized(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., D] of words and scales."""
    if words.stride(-1) != 1:  # a view of bytes needs contiguous words
        words = words.clone(memory_format=torch.contiguous_format)
    return (words.view(torch.int8) * scale[..., None].float()).to(dtype)


def rounded(rows: Tensor) -> Tensor:
    """Rows [..., D] after quantization and dequantization, in their own type. Traces as standard ops."""
    wide = rows.float()
    scale = _parts(wide.abs().amax(-1, keepdim=True).clamp_min(LEAST))
    return (_nearest(wide / scale) * scale).to(rows.dtype)


def _parts(largest: Tensor) -> Tensor:
    # CUDA would multiply by the reciprocal of a Python number, which violates the rule; hence a tensor.
    return largest / torch.full_like(largest, STEPS)
