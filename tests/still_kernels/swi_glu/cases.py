"""Holds the kernel of still::SwiGlu to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from tests.still_kernels.stateless_cases import launched, main, worst_error
from tests.still_kernels.swi_glu.inputs import CASES, call, exact


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.swi_glu.plan import OP, Variant
    from still_kernels.tile import changed

    case, worst = CASES[name], 0.0
    table = changed(OP.tiles(Variant(), 90), "swi_glu", {"BC": 64}) if device == "cpu" else None
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = [exact(given)]
        worst = max(worst, worst_error(launched(OP.launch, given, expected, table, device), expected))
    return worst


if __name__ == "__main__":
    main(run_case, CASES)
