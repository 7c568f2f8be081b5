"""Calls of still::SwiGlu held to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from still_kernels.swi_glu.plan import Inputs
from tests.still_kernels.stateless_cases import main, small, worst_of


@dataclass(frozen=True)
class Case:
    """Numbers of a half; gates far below 0 show an exponential that overflows."""

    width: int = 56
    scale: float = 3.0
    rows: tuple[tuple[int, int], ...] = ((1, 1), (3, 7))  # batch, tokens


CASES = {
    "one block": Case(),
    "several blocks": Case(200),
    "odd size": Case(77, rows=((2, 5),)),
    "large numbers": Case(40, 90.0),
}


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random numbers [batch, count, 2 * width]."""
    generator = torch.Generator().manual_seed(batch + 17 * count)
    return Inputs((case.scale * torch.randn(batch, count, 2 * case.width, generator=generator)).to(dtype), case.width)


def exact(given: Inputs) -> torch.Tensor:
    """The results, float64."""
    gate, up = given.input.double()[..., : given.width], given.input.double()[..., given.width :]
    return gate / (1 + (-gate).exp()) * up


def run_case(name: str, device: str = "cpu") -> float:
    from still_kernels.swi_glu.plan import OP, Variant

    return worst_of(OP, CASES[name], call, exact, device, small(OP, Variant(), device, swi_glu={"BC": 64}))


if __name__ == "__main__":
    main(run_case, CASES)
