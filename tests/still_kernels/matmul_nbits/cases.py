"""Holds the kernels of still::MatMulNBits to products in float64; as a program ([NAME ...]): in interpreters, prints the errors.

Triton's interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from still_kernels.tile import Setting, TileTable
from tests.still_kernels.matmul_nbits.inputs import FEW, MANY, Case, exact, tokens, weight
from tests.still_kernels.stateless_cases import launched, main, worst_error

CASES = {
    **{f"few: {name}": case for name, case in FEW.items()},
    **{f"many: {name}": case for name, case in MANY.items()},
}
SMALL: dict[str, Setting] = {
    "few": {"SPLITS": 2, "UNITS": 1},
    "unpack": {"BN": 8, "BW": 4},
    "multiply": {"BM": 32, "BN": 16, "BK": 32, "GROUP": 2},
}
"""Blocks so small that these calls have several of each."""


def tables_of(case: Case, device: str) -> list[TileTable]:
    """On a GPU those of all spans; in interpreters small ones, which ask for a weight, nothing, or a weight and activations ahead."""
    from still_kernels.launcher import arch_of
    from still_kernels.matmul_nbits.plan import OP, Variant
    from still_kernels.tile import changed

    aligned, arch = int(case.outputs % 8 == 0), arch_of(torch.device(device))
    if device != "cpu":
        return [OP.tiles(Variant(bits=case.bits, aligned=aligned, span=span), arch) for span in range(3)]
    table = OP.tiles(Variant(bits=case.bits, aligned=aligned, span=0), arch)
    for kernel, setting in SMALL.items():
        table = changed(table, kernel, setting)
    table = changed(table, "multiply", {"dense_weights": 24 * case.inputs})  # a weight in several parts
    return [changed(table, "few", {"AHEAD": ahead}) for ahead in (1, 0, 2)]


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of the outputs of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error. In
    interpreters each call has one table."""
    from still_kernels.matmul_nbits.plan import OP

    case, worst = CASES[name], 0.0
    held, tables = weight(case), tables_of(case, device)
    for i, (batch, count) in enumerate(case.rows):
        given = replace(held, input=tokens(case, batch, count))
        expected = exact(given)
        for table in tables if device != "cpu" else tables[i % 3 :][:1]:
            outputs = launched(OP.launch, given, [expected], table, device)
            worst = max(worst, worst_error(outputs, [expected]))
    return worst


if __name__ == "__main__":
    main(run_case, CASES)
