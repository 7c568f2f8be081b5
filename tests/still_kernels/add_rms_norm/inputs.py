"""Calls of still::AddRmsNorm: random tokens, and what must come out, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from still_kernels.add_rms_norm.plan import Inputs


@dataclass(frozen=True)
class Case:
    """Numbers of a token; a small one, or a large epsilon, shows in the result."""

    width: int = 56
    scale: float = 1.0
    epsilon: float = 1e-5
    summed: bool = True
    rows: tuple[tuple[int, int], ...] = ((1, 1), (3, 7))  # batch, tokens


CASES = {
    "one block": Case(),
    "several blocks": Case(200),
    "odd size": Case(77, rows=((2, 5),)),
    "small numbers": Case(104, 0.01, 3e-4),
    "wide": Case(1032, rows=((1, 2),)),
    "no residual": Case(200, summed=False),
}


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random numbers [batch, count, width] and a weight."""
    generator = torch.Generator().manual_seed(batch + 17 * count)
    x, residual = case.scale * torch.randn(2, batch, count, case.width, generator=generator)
    weight = 1 + 0.3 * torch.randn(case.width, generator=generator)
    return Inputs(x.to(dtype), (3 * residual).to(dtype) if case.summed else None, weight.to(dtype), case.epsilon)


def exact(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded sum, or the input, and its norm in float64."""
    total = given.input.double() + (0 if given.residual is None else given.residual.double())
    total = total.to(given.input.dtype).double()
    root = ((total**2).sum(-1, keepdim=True) / total.shape[-1] + given.norm_epsilon).sqrt()
    return total, total / root * given.norm_weight.double()
