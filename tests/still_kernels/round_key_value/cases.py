"""Holds the kernel of still::RoundKeyValue to the rows that a state holds; as a program ([NAME ...]): in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

from tests.still_kernels.round_key_value.inputs import CASES, call, exact
from tests.still_kernels.stateless_cases import launched, main


def run_case(name: str, device: str = "cpu") -> float:
    """How many numbers of all calls differ. Outputs start as NaN, a write outside is an error."""
    from still_kernels.round_key_value.plan import OP

    differ = 0
    for batch, count in CASES[name].rows:
        given = call(CASES[name], batch, count)
        expected = [exact(given.key), exact(given.value)]
        outputs = launched(OP.launch, given, expected, None, device)
        differ += sum(int((x.cpu() != y).sum()) for x, y in zip(outputs, expected, strict=True))
    return float(differ)


if __name__ == "__main__":
    main(run_case, CASES)
