"""Holds the kernels of still::GatedMlp to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import torch

from still_kernels.tile import Setting, TileTable
from tests.still_kernels.gated_mlp.inputs import CASES, call, exact
from tests.still_kernels.stateless_cases import launched, main, worst_error

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
    """Greatest relative error of the outputs of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.gated_mlp.plan import OP

    case, worst, tables = CASES[name], 0.0, [None]
    if device == "cpu":
        tables = [small_table(aligned) for aligned in range(1 + (case.middle % 8 == case.width % 8 == 0))]
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = exact(given)
        for table in tables:
            outputs = launched(OP.launch, given, [expected], table, device)
            worst = max(worst, worst_error(outputs, [expected]))
    return worst


if __name__ == "__main__":
    main(run_case, CASES)
