"""Calls of still::GatedMlp held to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.gated_mlp.plan import Inputs
from still_kernels.tile import Setting, TileTable
from tests.still_kernels.dense_matmul.inputs import normed
from tests.still_kernels.stateless_cases import main, worst_of


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


SMALL: dict[str, Setting] = {
    **{name: {"BN": 16, "BK": 32} for name in ("few_gated", "few_down")},
    "split_down": {"BN": 16, "BK": 32, "split_outputs": 16, "split_inputs": 1024, "split_programs": 15},
    **{f"some_{name}": {"BM": 16, "BN": 32, "BK": 32, "GROUP": 2} for name in ("gated", "down")},
    **{f"many_{name}": {"BM": 32, "BN": 16, "BK": 32, "GROUP": 2} for name in ("gated", "down")},
    "norm": {"BC": 64},
}
"""Blocks so small that these calls have several of each."""


def small_table(aligned: int) -> TileTable:
    """The interpreter's table, of kernels that copy by TMA where sizes are multiples of 8, with small blocks."""
    from still_kernels.gated_mlp.plan import OP, Variant
    from still_kernels.launcher import arch_of
    from still_kernels.tile import changed

    table = OP.tiles(Variant(aligned=aligned, span=0, gated_span=0), arch_of(torch.device("cpu")))
    for kernel in table.tiles:
        table = changed(table, kernel, SMALL[kernel.removesuffix("_tma")])
    return table


def run_case(name: str, device: str = "cpu") -> float:
    from still_kernels.gated_mlp.plan import OP

    case = CASES[name]
    whole = case.middle % 8 == case.width % 8 == 0
    tables = [small_table(aligned) for aligned in range(1 + whole)] if device == "cpu" else [None]
    return worst_of(OP, case, call, exact, device, tables)


if __name__ == "__main__":
    main(run_case, CASES)
