"""Calls of still::MatMulNBits: random weights of all kinds, and what must come out, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_export.graph.quantization.read import eight_bits
from still_kernels.matmul_nbits.plan import Inputs, dequantized

UNIT = 32
"""Inputs that the CPU's kernels round with one factor."""
OUTLIER = 4.0
"""Root mean squares of a token beyond which a number has its unit rounded twice."""


@dataclass(frozen=True)
class Case:
    """Sizes that all differ; `inputs` is no multiple of what a program takes at a time."""

    bits: int = 4
    zero_points: bool = True
    outputs: int = 77
    inputs: int = 288
    block_size: int = 32
    rows: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (1, 3), (8, 1), (3, 3))  # batch, tokens
    offsets: bool = False
    zero: int = -1


FEW = {
    "4 bits": Case(),
    "4 bits, no zero points": Case(zero_points=False, outputs=40, inputs=1184),
    "4 bits, blocks of 64": Case(outputs=19, inputs=320, block_size=64, rows=((5, 1),)),
    "4 bits, offsets": Case(zero_points=False, outputs=40, offsets=True),
    "8 bits": Case(8, False),
    "8 bits, zero points, offsets": Case(8, outputs=19, inputs=320, rows=((1, 1), (2, 8)), offsets=True),
    "8 bits, zero points": Case(8, outputs=40, inputs=1184, rows=((1, 1), (2, 8))),
    "one block": Case(outputs=3, inputs=32, rows=((1, 1), (7, 1))),
}
CODES_FROM_0 = {
    "4 bits from 0, offsets": Case(zero_points=False, outputs=40, offsets=True, zero=0),
    "8 bits from 3": Case(8, False, zero=3),
}
"""Which have no kernels on GPUs."""
MANY = {
    "4 bits": Case(rows=((1, 65), (2, 43), (3, 43))),
    "4 bits, no zero points": Case(zero_points=False, outputs=40, inputs=160, rows=((1, 129),)),
    "4 bits, offsets": Case(zero_points=False, outputs=40, inputs=160, rows=((1, 66),), offsets=True),
    "8 bits": Case(8, False, outputs=136, inputs=96, rows=((1, 70),)),
    "8 bits, zero points": Case(8, outputs=35, rows=((1, 70),)),
}


def weight(case: Case, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random codes, scales of both signs and zero points; no tokens."""
    generator = torch.Generator().manual_seed(case.inputs + case.outputs)

    def words(count: int) -> Tensor:
        shape = (case.outputs, count)
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(torch.int32)

    blocks = case.inputs // case.block_size
    signs = torch.randint(0, 2, (case.outputs, blocks), generator=generator) * 2 - 1
    scales = (torch.rand(case.outputs, blocks, generator=generator) + 0.1) * signs / 2 ** (case.bits + 2)
    return Inputs(
        torch.empty(1, 0, case.inputs, dtype=dtype),
        words(case.inputs * case.bits // 32),
        scales.to(dtype),
        words(-(-blocks * case.bits // 32)) if case.zero_points else None,
        case.bits,
        case.block_size,
        (torch.rand(scales.shape, generator=generator) - 0.5).to(dtype) if case.offsets else None,
        case.zero,
    )


def tokens(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """[batch, count, inputs]."""
    generator = torch.Generator().manual_seed(batch + 17 * count)
    return torch.randn(batch, count, case.inputs, generator=generator).to(dtype)


def with_outliers(given: Tensor) -> Tensor:
    """The same with a few large numbers in two of three tokens, in one unit or several."""
    far = given.clone()
    far[:, ::3, 5::97] *= 50
    far[:, 1::3, -1:] = 300
    return far


def rounded(x: Tensor) -> Tensor:
    """Tokens as the CPU's kernels round them: to 8 bits by UNIT inputs, and what is left of units with an outlier once more."""
    codes = eight_bits(x, UNIT)
    far = x.unflatten(-1, (-1, UNIT)).abs().amax(-1) > OUTLIER * x.square().mean(-1, keepdim=True).sqrt()
    return codes + eight_bits(x - codes, UNIT) * far.repeat_interleave(UNIT, -1)


def exact(given: Inputs) -> Tensor:
    """The product over the weight as it is held, float64."""
    return given.input.double() @ dequantized(given).double().T


def exact_numbers(given: Inputs, round_tokens: bool = True) -> Tensor:
    """The same over scales and offsets as they are; `round_tokens`: of tokens as `rounded` has them."""
    wide = {name: x.double() for name, x in vars(given).items() if name in ("scales", "offsets") and x is not None}
    x = given.input.double()
    return exact(replace(given, input=rounded(x) if round_tokens else x, **wide))
