"""Calls of still::BetweenAttention: random weights, and what must come out, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.between_attention import Inputs
from tests.dense_matmul_cases import normed


@dataclass(frozen=True)
class Case:
    """Sizes; a gate of 0 is none."""

    attended: int
    width: int
    middle: int
    outputs: int
    gate: int = 0


CASES = {
    "SmolLM2-135M": Case(576, 576, 1536, 960, 576),
    "without a gate": Case(576, 576, 1536, 960),
    "sizes that all differ": Case(80, 208, 48, 112, 32),
    "the most inputs": Case(3456, 512, 240, 16),
    "the widest token": Case(16, 1536, 16, 512, 16),
    "much between": Case(64, 96, 3408, 48, 96),
}


def call(case: Case, batch: int = 1, count: int = 1, dtype: torch.dtype = torch.float16) -> Inputs:
    """Random tokens [batch, count, ...] and weights."""
    generator = torch.Generator().manual_seed(batch + 17 * count)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def weight(*shape: int) -> Tensor:
        return drawn(*shape) / shape[0] ** 0.5

    attended, width, middle = case.attended, case.width, case.middle
    tokens = drawn(batch, count, attended), drawn(batch, count, width)
    layer = weight(attended, width), drawn(width), weight(middle, width), weight(width, 2 * middle)
    after = drawn(width), weight(width, case.outputs)
    gate = weight(width, case.gate) if case.gate else None
    return Inputs(*tokens, *layer, *after, gate, norm_epsilon=3e-5, gate_width=case.gate)


def exact(given: Inputs) -> list[Tensor]:
    """The results, float64; norms and what lies between the products are rounded."""
    kind = given.attention.dtype
    x = (given.residual.double() + given.attention.double() @ given.output_weight.double()).to(kind)
    rows = normed(x, given.norm_weight, given.norm_epsilon)
    gate, up = (rows.double() @ given.gate_up.double()).chunk(2, -1)
    middle = (gate * gate.sigmoid() * up).to(kind)
    layer = x.double() + middle.double() @ given.down.double()
    rows = normed(layer.to(kind), given.next_norm_weight, given.norm_epsilon)
    weights = [w for w in (given.next_weight, given.next_gate_weight) if w is not None]
    return [layer, *(rows.double() @ weight.double() for weight in weights)]
