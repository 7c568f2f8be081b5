"""Holds the kernel of still::AddRmsNorm to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import torch

from tests.still_kernels.add_rms_norm.inputs import CASES, call, exact
from tests.still_kernels.stateless_cases import launched, main, worst_error


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of an output of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.add_rms_norm.plan import OP, Variant
    from still_kernels.tile import changed

    case, worst = CASES[name], 0.0
    wide = case.width > 1024
    table = changed(OP.tiles(Variant(), 90), "add_norm", {"BC": 64}) if device == "cpu" and not wide else None
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = exact(given)
        outputs = launched(OP.launch, given, expected, table, device)
        assert torch.equal(outputs[0].cpu().double(), expected[0]), "a sum is rounded once"
        worst = max(worst, worst_error(outputs, expected))
    return worst


if __name__ == "__main__":
    main(run_case, CASES)
