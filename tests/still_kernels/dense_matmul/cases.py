"""Holds the kernels of still::DenseMatMul to products in float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import torch

from still_kernels.tile import Setting, TileTable
from tests.still_kernels.dense_matmul.inputs import FEW, FLOAT8, MANY, SOME, Case, call, every_number, exact
from tests.still_kernels.stateless_cases import launched, main, worst_of

CASES = {**FEW, **SOME, **MANY, **FLOAT8}
NUMBERS = "e4m3, every number"
SMALL: dict[str, Setting] = {
    "few": {"BN": 16, "BK": 32},
    "split": {"BN": 16, "BK": 128, "split_outputs": 16, "split_inputs": 1024, "split_programs": 15, "norm_apart": 1},
    "some": {"BM": 16, "BN": 32, "BK": 32, "GROUP": 2},
    "many": {"BM": 32, "BN": 16, "BK": 32, "GROUP": 2},
    "norm": {"BC": 64},
    "round8": {"BC": 64},
    "round8_short": {"BC": 512},
    "few8": {"BN": 16},
    "some8": {"BM": 16, "BN": 32, "GROUP": 2},
    "many8": {"BM": 32, "BN": 16, "GROUP": 2, "many8_fewest": 4, "many8_programs": 3},
    "many8_tma": {"STORE": 8},
}
"""Blocks so small that these calls have several of each."""


def small_table(case: Case, aligned: int) -> TileTable:
    """The interpreter's table, of kernels that copy by TMA where sizes are multiples of 8, with small blocks."""
    from still_kernels.dense_matmul.plan import OP, Variant
    from still_kernels.launcher import arch_of
    from still_kernels.tile import changed

    float8 = {"float8": 1, "blocked": int(case.blocks > 1), "whole": int(case.inputs % 128 == 0)} if case.blocks else {}
    variant = Variant(turned=int(case.turned), normed=int(case.normed), aligned=aligned, **float8)
    table = OP.tiles(variant, arch_of(torch.device("cpu")))
    for kernel in table.tiles:
        setting = SMALL[kernel.removesuffix("_tma")]
        table = changed(table, kernel, setting if kernel not in SMALL else {**setting, **SMALL[kernel]})
    return table


def run_case(name: str, device: str = "cpu") -> float:
    from still_kernels.dense_matmul.plan import OP

    if name == NUMBERS:
        return wrong_numbers(device)
    case = CASES[name]
    whole = case.outputs % 8 == case.inputs % 8 == 0
    tables = [small_table(case, aligned) for aligned in range(1 + whole)] if device == "cpu" else [None]
    return worst_of(OP, case, call, exact, device, tables)


def wrong_numbers(device: str) -> float:
    """How many numbers of tokens are not rounded as torch does it, to the last bit."""
    from still_kernels.dense_matmul.plan import OP

    given, expected = every_number()
    table = None if device != "cpu" else small_table(Case(inputs=256, blocks=1), 1)
    (found,) = launched(OP.launch, given, [expected], table, device)
    same = (found.cpu() == expected) | (found.cpu().isnan() & expected.isnan())
    return float((~same).sum())


if __name__ == "__main__":
    main(run_case, [*CASES, NUMBERS])
