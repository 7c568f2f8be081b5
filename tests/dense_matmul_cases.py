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
    "few, inputs shared": Case(inputs=3100, rows=((1, 1), (3, 7)), residual=True),
    "few, inputs shared, odd sizes": Case(outputs=37, inputs=2051, rows=((1, 17),)),
    "few, inputs shared, norm": Case(inputs=2056, rows=((3, 7),), normed=True),
    "few, inputs shared, whole": Case(inputs=2112, rows=((2, 1),)),
    "few, odd sizes, turned, norm": Case(True, 37, 83, ((2, 1), (1, 64)), normed=True),
}
SOME = {
    "some, whole": Case(inputs=192, rows=((1, 66),)),
    "some, as LoRA's second product": Case(inputs=24, rows=((1, 70),), residual=True),
    "some": Case(rows=((1, 65), (2, 43), (3, 43))),
    "some, turned, residual": Case(turned=True, rows=((1, 129),), residual=True),
    "some, odd sizes, norm": Case(outputs=37, inputs=83, rows=((1, 70),), normed=True),
    "some, odd sizes, turned": Case(True, 35, 41, ((1, 70),)),
}
MANY = {
    "many": Case(outputs=40, inputs=72, rows=((1, 257), (2, 150)), residual=True),
    "many, whole": Case(outputs=24, inputs=64, rows=((1, 270),)),
    "many, odd sizes, turned, norm": Case(True, 35, 41, ((1, 258),), normed=True),
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
