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
def near_codes(share: float, generator: torch.Generator) -> Iterator[None]:
    """Context in which a number gets either of two codes, or of two numbers of a narrower float type, at random, if it is about halfway
    between them: within `share` of its row's largest number. Another runtime may store either. With -`share` and the same random numbers
    each such number gets the other."""
    global _near
    before, _near = _near, (share, generator)
    try:
        yield
    finally:
        _near = before


def _moved(rows: Tensor, largest: Tensor | float) -> Tensor:
    """Rows [..., D] about halfway between two codes go either way; `largest` of a row, [..., 1]."""
    if _near is None:
        return rows
    share, generator = _near
    signs = 2 * torch.randint(2, rows.shape, generator=generator) - 1
    return rows + signs.to(rows) * largest * share


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., D] in a narrower float type."""
    return _moved(x, x.abs().amax(-1, keepdim=True) if _near else 0.0).to(dtype)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] of any float type as words int32 [..., D / 4] and scales float32 [...]."""
    wide = rows.float()
    scale = _parts(wide.abs().amax(-1))
    codes = torch.round(_moved(wide / torch.where(scale > 0, scale, 1)[..., None], STEPS))
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
    return (torch.round(_moved(wide / scale, STEPS)) * scale).to(rows.dtype)


def _parts(largest: Tensor) -> Tensor:
    # CUDA would multiply by the reciprocal of a Python number, which violates the rule; hence a tensor.
    return largest / torch.full_like(largest, STEPS)
