"""Calls of still::RotaryQkv held to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_kernels.rotary_qkv.plan import Inputs
from tests.still_kernels.stateless_cases import main, small, worst_of


@dataclass(frozen=True)
class Case:
    """Widths that all differ; a program's columns end inside of each."""

    head: int = 16
    heads: int = 9
    kv_heads: int = 3
    value: int = 40
    gate: int = 0
    bias: bool = False
    apart: bool = False  # the gate's numbers are of another product
    rows: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (3, 7))  # batch, tokens


CASES = {
    "no gate": Case(),
    "gate": Case(gate=104, bias=True),
    "gate without a bias": Case(gate=56),
    "gate of another product": Case(gate=104, bias=True, apart=True),
    "odd sizes": Case(6, 5, 7, 13, 11, True, rows=((1, 1), (2, 5))),
    "odd sizes, gate of another product": Case(6, 5, 7, 13, 11, False, True, ((1, 1), (2, 5))),
    "odd heads, no gate": Case(2, 3, 1, 5, rows=((1, 9),)),
}


def call(case: Case, batch: int, count: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random numbers [batch, count, F], angles whose halves differ, and a bias."""
    generator = torch.Generator().manual_seed(batch + 17 * count)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    widths = case.heads * case.head, case.kv_heads * case.head, case.value, case.gate
    angles = 9 * torch.rand(batch, count, case.head, generator=generator)
    bias = drawn(case.gate) if case.bias else None
    given = Inputs(3 * drawn(batch, count, sum(widths)), angles.cos().to(dtype), angles.sin().to(dtype), *widths, bias)
    if not case.apart:
        return given
    own, gate = given.input.split((sum(widths[:3]), widths[3]), -1)
    return replace(given, input=own.contiguous(), gate_input=gate.contiguous())


def exact(given: Inputs) -> list[Tensor]:
    """The results, float64, element by element of a head."""
    widths = given.query_width, given.key_width, given.value_width, given.gate_width
    whole = given.input if given.gate_input is None else torch.cat((given.input, given.gate_input), -1)
    query, key, value, gate = whole.double().split(widths, -1)
    size, results = given.cos.shape[2], []
    for part in (query, key):
        result = torch.empty_like(part)
        for column in range(part.shape[2]):
            place = column % size
            far = -part[..., column + size // 2] if place < size // 2 else part[..., column - size // 2]
            result[..., column] = part[..., column] * given.cos[..., place] + far * given.sin[..., place]
        results.append(result)
    results.append(value)
    if given.gate_width:
        results.append(1 / (1 + (-(gate if given.gate_bias is None else gate + given.gate_bias.double())).exp()))
    return results


def run_case(name: str, device: str = "cpu") -> float:
    from still_kernels.rotary_qkv.plan import OP, Variant

    return worst_of(OP, CASES[name], call, exact, device, small(OP, Variant(), device, rotary={"BC": 32}))


if __name__ == "__main__":
    main(run_case, CASES)
