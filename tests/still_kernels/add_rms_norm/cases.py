"""Calls of still::AddRmsNorm held to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from still_kernels.add_rms_norm.plan import Inputs
from tests.still_kernels.stateless_cases import launched, main, small, worst_error


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


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of an output of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.add_rms_norm.plan import OP, Variant

    case, worst = CASES[name], 0.0
    tables = small(OP, Variant(), device, add_norm={"BC": 64}) if case.width <= 1024 else (None,)
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = exact(given)
        outputs = launched(OP.launch, given, expected, tables[0], device)
        assert torch.equal(outputs[0].cpu().double(), expected[0]), "a sum is rounded once"
        worst = max(worst, worst_error(outputs, expected))
    return worst


if __name__ == "__main__":
    main(run_case, CASES)
