"""Gradients of kernels without a backward pass: run the PyTorch function again and differentiate it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@functools.cache
def fused(function: Callable[..., Any], device: torch.device, dynamic: bool | None = False) -> Callable[..., Any]:
    """`function`, compiled on CUDA. Unfused elementwise work on float32 copies would cost more than the GEMMs around it.

    Args:
        dynamic: See torch.compile; None: the second sequence length compiles for all others.
    """
    return function if device.type == "cpu" else torch.compile(function, dynamic=dynamic)


def recompute(
    call: Callable[..., Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> Iterator[Tensor | None]:
    """Gradients of the `wanted` tensors, by a new run of `call(*tensors)` whose output has the gradient `grad`; None for the others."""
    leaves = [
        None if t is None else t.detach().requires_grad_(needs_grad)
        for t, needs_grad in zip(tensors, wanted, strict=True)
    ]
    with torch.enable_grad():
        output = call(*leaves)
    required = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(output, required, grad, allow_unused=True))
    return (next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves)
