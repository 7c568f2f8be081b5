"""The type that keys and values are kept in, where it is narrower than the activations'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def kept_dtype(config: Any, dtype: torch.dtype) -> torch.dtype:
    """Of a model with the STILL family configuration `config` and activations of type `dtype`."""
    return narrower(config.still.cache, dtype)


def narrower(cache: str | None, dtype: torch.dtype) -> torch.dtype:
    """`cache` where that has fewer bits than `dtype`, which is kept otherwise."""
    wanted = dtype if cache is None else getattr(torch, cache)
    return wanted if wanted.itemsize < dtype.itemsize else dtype


def rounded(x: Tensor, cache: str | None) -> Tensor:
    """`x` as a cache of type `cache` keeps it, in its own type: a call computes with the numbers that later calls read."""
    kept = narrower(cache, x.dtype)
    return x if kept == x.dtype else x.to(kept).to(x.dtype)
