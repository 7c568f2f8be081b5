"""Holds the kernels of still::LowRankMatMul to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from still_kernels.low_rank_matmul.plan import Inputs
from tests.still_kernels.stateless_cases import main, small, worst_of


@dataclass(frozen=True)
class Case:
    """Inputs, numbers between, outputs; rows of a step and of a prompt."""

    sizes: tuple[int, int, int] = (72, 16, 104)
    base: bool = True
    rows: tuple[tuple[int, int], ...] = ((1, 1), (3, 7))  # batch, tokens


CASES = {
    "added": Case(),
    "alone": Case((72, 24, 56), False),
    "several ranks": Case((40, 88, 72)),
    "odd sizes": Case((37, 11, 29)),
    "a prompt": Case((72, 40, 104), rows=((1, 70),)),
    "a prompt, alone": Case((37, 70, 45), False, rows=((2, 35),)),
}


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random tokens and matrices; the base is as large as the product."""
    random = torch.Generator().manual_seed(batch + 17 * count)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    inputs, rank, outputs = case.sizes
    inner, outer = drawn(inputs, rank) / inputs**0.5, drawn(rank, outputs) / rank**0.5
    base = drawn(batch, count, outputs).to(dtype) if case.base else None
    return Inputs(drawn(batch, count, inputs).to(dtype), inner.to(dtype), outer.to(dtype), base)


def exact(given: Inputs) -> torch.Tensor:
    """In float64; what lies between the products is rounded."""
    low = (given.input.double() @ given.inner.double()).to(given.input.dtype).double()
    return low @ given.outer.double() + (0 if given.base is None else given.base.double())


def run_case(name: str, device: str = "cpu") -> float:
    from still_kernels.low_rank_matmul.plan import OP, Variant

    blocks = {"BM": 16, "BN": 32, "BK": 32}  # which end inside of the matrices
    own = {"low_rank": {"BN": 16, "BK": 32, "BR": 32}, "lower": blocks, "raise": blocks}
    return worst_of(OP, CASES[name], call, exact, device, small(OP, Variant(), device, **own))


if __name__ == "__main__":
    main(run_case, CASES)
