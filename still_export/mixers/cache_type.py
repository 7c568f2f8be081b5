"""The type of cached keys and values, if it has fewer bits than the activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from still_kernels import codes


def cache_dtype(config: Any, dtype: torch.dtype) -> torch.dtype:
    """The type for the STILL family configuration `config` and activations of `dtype`."""
    return narrower(config.still.deployment.cache, dtype)


def narrower(cache: str | None, dtype: torch.dtype) -> torch.dtype:
    """`cache`, if it has fewer bits than `dtype`, else `dtype`. The op itself handles 8-bit rows."""
    wanted = dtype if cache in (None, "int8") else getattr(torch, str(cache))
    return wanted if wanted.itemsize < dtype.itemsize else dtype


def rounded(x: Tensor, cache: str | None) -> Tensor:
    """`x` rounded to cache type `cache`, in its own type: a call computes with the numbers that later calls read."""
    if cache == "int8":
        return codes.rounded(x)
    stored_dtype = narrower(cache, x.dtype)
    return x if stored_dtype == x.dtype else codes.stored(x, stored_dtype).to(x.dtype)
