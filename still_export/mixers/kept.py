"""The type that keys and values are kept in, where it has fewer bits than the activations'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from still_kernels import codes


def kept_dtype(config: Any, dtype: torch.dtype) -> torch.dtype:
    """Of a model with the STILL family configuration `config` and activations of type `dtype`."""
    return narrower(config.still.deployment.cache, dtype)


def narrower(cache: str | None, dtype: torch.dtype) -> torch.dtype:
    """Of numbers: `cache` where that has fewer bits than `dtype`, which is kept otherwise. Rows of 8 bits are the op's own affair."""
    wanted = dtype if cache in (None, "int8") else getattr(torch, str(cache))
    return wanted if wanted.itemsize < dtype.itemsize else dtype


def rounded(x: Tensor, cache: str | None) -> Tensor:
    """`x` as a cache of type `cache` keeps it, in its own type: a call computes with the numbers that later calls read."""
    if cache == "int8":
        return codes.rounded(x)
    kept = narrower(cache, x.dtype)
    return x if kept == x.dtype else x.to(kept).to(x.dtype)
