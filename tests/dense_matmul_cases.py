"""Calls of still::DenseMatMul: random weights both ways round, and what must come out, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.dense_matmul import Inputs


@dataclass(frozen=True)
class Case:
    """Sizes that all differ; inputs and outputs are no multiples of what a program takes at a time."""

    turned: bool = False
    outputs: int = 72
    inputs: int = 200
    rows: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (3, 7))  # batch, tokens
    normed: bool = False
    residual: bool = False


FEW = {
    "few": Case(),
    "few, turned": Case(turned=True),
    "few, odd sizes, residual": Case(outputs=37, inputs=83, rows=((1, 1), (1, 17)), residual=True),
    "few, as LoRA's second product": Case(inputs=8, rows=((1, 1), (3, 7)), residual=True),
    "few, odd sizes, turned, norm": Case(True, 37, 83, ((2, 1), (1, 64)), normed=True),
}
MANY = {
    "many, whole": Case(inputs=192, rows=((1, 66),)),
    "many, as LoRA's second product": Case(inputs=24, rows=((1, 70),), residual=True),
    "many": Case(rows=((1, 65), (2, 43), (3, 43))),
    "many, turned, residual": Case(turned=True, rows=((1, 129),), residual=True),
    "many, odd sizes, norm": Case(outputs=37, inputs=83, rows=((1, 70),), normed=True),
    "many, odd sizes, turned": Case(True, 35, 41, ((1, 70),)),
}


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random tokens [batch, count, inputs] and the weight of the case."""
    generator = torch.Generator().manual_seed(batch + 17 * count)
    tokens = torch.randn(batch, count, case.inputs, generator=generator).to(dtype)
    weight = torch.randn(case.inputs, case.outputs, generator=generator).to(dtype)
    given: dict[str, Tensor] = {"turned_weight": weight.T.contiguous()} if case.turned else {"weight": weight}
    if case.normed:
        given["norm_weight"] = torch.randn(case.inputs, generator=generator).to(dtype)
        tokens *= 0.01  # so that epsilon counts
    if case.residual:
        given["residual"] = 50 * torch.randn(batch, count, case.outputs, generator=generator).to(dtype)
    return Inputs(tokens, **given, norm_epsilon=3e-5)


def exact(given: Inputs) -> Tensor:
    """The result, float64, of rounded norms."""
    weight = given.turned_weight.T if given.weight is None else given.weight  # type: ignore[union-attr]
    x = given.input if given.norm_weight is None else normed(given.input, given.norm_weight, given.norm_epsilon)
    product = x.double() @ weight.double()
    return product if given.residual is None else product + given.residual.double()


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the root mean square, rounded to the type of the activations."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()).to(x.dtype)
