"""Calls of still::DenseMatMul: random weights both ways round, and what must come out, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.dense_matmul.plan import Inputs


@dataclass(frozen=True)
class Case:
    """Sizes that all differ; inputs and outputs are no multiples of what a program takes at a time."""

    turned: bool = False
    outputs: int = 72
    inputs: int = 200
    rows: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (3, 7))  # batch, tokens
    normed: bool = False
    residual: bool = False
    blocks: int = 0  # of inputs, of a weight in e4m3


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


FLOAT8 = {
    "e4m3, few": Case(inputs=208, blocks=1, rows=((1, 1), (3, 5))),
    "e4m3, few, odd sizes, residual, norm": Case(
        outputs=37, inputs=80, blocks=1, rows=((2, 8),), normed=True, residual=True
    ),
    "e4m3, few, blocks": Case(inputs=384, blocks=3, rows=((1, 1), (2, 8)), residual=True),
    "e4m3, some": Case(inputs=208, blocks=1, rows=((1, 17), (2, 43)), normed=True),
    "e4m3, some, blocks, odd sizes": Case(outputs=37, inputs=256, blocks=2, rows=((1, 66),), residual=True),
    "e4m3, many": Case(outputs=40, inputs=256, blocks=1, rows=((1, 257),), residual=True),
    "e4m3, many, blocks": Case(outputs=40, inputs=256, blocks=2, rows=((2, 150),)),
    "e4m3, many, odd sizes": Case(outputs=35, inputs=144, blocks=1, rows=((1, 258),)),
}
"""Inputs that are no multiple of 128 are not copied by TMA."""


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random tokens [batch, count, inputs] and the weight of the case."""
    generator = torch.Generator().manual_seed(batch + 17 * count)
    tokens = torch.randn(batch, count, case.inputs, generator=generator).to(dtype)
    weight = torch.randn(case.inputs, case.outputs, generator=generator).to(dtype)
    given: dict[str, Tensor] = {"turned_weight": weight.T.contiguous()} if case.turned else {"weight": weight}
    if case.blocks:
        given = dict(zip(("codes", "scales"), float8(weight.T.float(), case.blocks), strict=True))
        tokens[0, 1:2] = 0  # has no scale
    if case.normed:
        given["norm_weight"] = torch.randn(case.inputs, generator=generator).to(dtype)
        tokens *= 0.01  # so that epsilon counts
    if case.residual:
        given["residual"] = 50 * torch.randn(batch, count, case.outputs, generator=generator).to(dtype)
    return Inputs(tokens, **given, norm_epsilon=3e-5)


def float8(weight: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """A weight [O, I] in words of codes [O, I / 4], and scales [blocks, O]; an output of zeros has no scale."""
    parts = weight.contiguous().unflatten(1, (blocks, -1))
    scales = parts.abs().amax(-1) / 448
    scales[0, 0] = 0
    codes = (parts / scales[..., None]).nan_to_num(0, 0, 0).to(torch.float8_e4m3fn).flatten(1)
    return codes.view(torch.int32), scales.T.contiguous()


def every_number() -> tuple[Inputs, Tensor]:
    """All numbers of half precision up to 448, in tokens whose scale is 1, times the identity, behind a token that has a number that is
    none and one that has an infinite one; and what must come out: what torch rounds them to."""
    numbers = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(torch.float16)
    numbers = numbers[numbers.abs() <= 448]
    tokens = torch.nn.functional.pad(numbers, (0, -len(numbers) % 255)).reshape(1, -1, 255)
    tokens = torch.cat([torch.full_like(tokens[..., :1], -448), tokens], -1)
    tokens[0, :2, 7] = torch.tensor([torch.nan, torch.inf])
    expected = tokens.to(torch.float8_e4m3fn).to(torch.float16)
    expected[0, :2] = torch.nan
    codes = torch.eye(256).to(torch.float8_e4m3fn).view(torch.int32)
    return Inputs(tokens, codes=codes, scales=torch.ones(1, 256)), expected


def exact(given: Inputs) -> Tensor:
    """The result, float64, of rounded norms; of codes one product after the other, with tokens that torch rounds."""
    x = given.input if given.norm_weight is None else normed(given.input, given.norm_weight, given.norm_epsilon)
    if given.codes is not None:
        assert given.scales is not None
        scale = x.float().abs().amax(-1, keepdim=True) / torch.tensor(448.0)
        wide = (x.float() / scale).nan_to_num(0).to(torch.float8_e4m3fn).double() * scale.double()
        codes, scales = given.codes.view(torch.float8_e4m3fn).double(), given.scales.double()
        size, product = codes.shape[1] // len(scales), torch.zeros(*x.shape[:2], len(codes), dtype=torch.float64)
        for i in range(codes.shape[1]):
            product += wide[..., i, None] * (codes[:, i] * scales[i // size])
    else:
        weight = given.turned_weight.T if given.weight is None else given.weight  # type: ignore[union-attr]
        product = x.double() @ weight.double()
    return product if given.residual is None else product + given.residual.double()


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the root mean square, rounded to the type of the activations."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()).to(x.dtype)
