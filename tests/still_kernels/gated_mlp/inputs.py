"""Calls of still::GatedMlp: random weights, and what must come out, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.gated_mlp.plan import Inputs
from tests.still_kernels.dense_matmul.inputs import normed


@dataclass(frozen=True)
class Case:
    """Sizes that all differ, and are no multiples of what a program takes at a time."""

    width: int = 72
    middle: int = 104
    rows: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (3, 7))  # batch, tokens


CASES = {
    "few": Case(),
    "few, odd sizes": Case(37, 83, ((1, 1), (1, 17))),
    "few, inputs shared": Case(middle=2112, rows=((3, 7),)),
    "some, whole": Case(64, 128, ((1, 66),)),
    "some": Case(rows=((1, 65), (2, 43))),
    "some, odd sizes": Case(37, 41, ((1, 70),)),
    "many, whole": Case(64, 64, ((1, 257),)),
    "many, odd sizes": Case(37, 41, ((2, 135),)),
}


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random tokens [batch, count, width] and weights."""
    generator = torch.Generator().manual_seed(batch + 17 * count)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    down = drawn(case.middle, case.width) / 8
    return Inputs(
        0.02 * drawn(batch, count, case.width), drawn(case.width), down, drawn(case.width, 2 * case.middle) / 8, 3e-5
    )


def exact(given: Inputs) -> Tensor:
    """The result, float64; norms and what lies between the products are rounded."""
    rows = normed(given.input, given.norm_weight, given.norm_epsilon)
    gate, up = (rows.double() @ given.gate_up.double()).chunk(2, -1)
    middle = (gate * gate.sigmoid() * up).to(given.input.dtype)
    return given.input.double() + middle.double() @ given.down.double()
