"""Calls of still::RoundKeyValue held to the rows that a state holds; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from still_kernels.round_key_value.plan import Inputs
from tests.still_kernels.stateless_cases import main, worst_of


@dataclass(frozen=True)
class Case:
    """Heads and their numbers."""

    heads: int = 3
    head_dim: int = 64
    rows: tuple[tuple[int, int], ...] = ((1, 1), (3, 5))  # batch, tokens


CASES = {
    "64": Case(),
    "128": Case(8, 128, rows=((1, 1), (2, 3))),
    "no power of two": Case(2, 48, rows=((2, 5),)),
}


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random rows [batch, count, heads, head_dim] of many sizes, one of them all 0."""
    generator = torch.Generator().manual_seed(batch + 17 * count)
    both = torch.randn(2, batch, count, case.heads, case.head_dim, generator=generator)
    both = both * 2 ** (6 * torch.randn(2, batch, count, case.heads, 1, generator=generator))
    both[0, 0, 0, 0] = 0
    key, value = both.clamp(-6e4, 6e4).to(dtype)
    return Inputs(key, value)


def exact(given: Inputs) -> list[torch.Tensor]:
    """What words and scales of a state hold of both."""
    from still_kernels.codes import dequantized, quantized

    return [dequantized(*quantized(rows), rows.dtype) for rows in (given.key, given.value)]


def run_case(name: str, device: str = "cpu") -> float:
    from still_kernels.round_key_value.plan import OP

    return worst_of(OP, CASES[name], call, exact, device)


if __name__ == "__main__":
    main(run_case, CASES)
