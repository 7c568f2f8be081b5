"""What verify allows a runtime: fixed bounds in float32, and in half precision what PyTorch's own half precision run allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from still_export.mixers.ties import Excuses
from still_export.proof.cases import Case

DIGITS = 3
SPREAD = 2.0
"""How much wider than PyTorch's worst part a runtime's may err: another draw, and sums in half precision."""


@dataclass(frozen=True)
class Tolerance:
    """Bounds of polygraphy's comparison: an output fails where its absolute and its relative error exceed them.

    `absolute` is the bound of each output, "" of the others. `statistic` is polygraphy's check_error_stat.
    `ties` are the leads of a selected token over the first rejected one (in logits) below which rounding may swap them, by the output that
    holds the scores, "" of the others.
    """

    absolute: dict[str, float]
    relative: float
    statistic: str
    ties: dict[str, float]

    def arguments(self) -> list[str]:
        """Polygraphy's flags."""
        bounds = [f"{name}:{bound}" if name else str(bound) for name, bound in self.absolute.items()]
        flags = ["--atol", *bounds, "--rtol", str(self.relative), "--check-error-stat", self.statistic]
        return [*flags, "--infinities-compare-equal"]


# PyTorch's own float32 logits of SmolLM2-135M (magnitude 25) are off its float64 ones by 4e-5 in the median of 120 decode steps
# and by up to 5.5e-3: a few tokens amplify rounding, in scores and keys too. Two float32 runtimes may differ by twice that.
FLOAT32 = Tolerance({"": 2e-2, "logits": 5e-2}, 1e-3, "elemwise", {"": 1e-3})


def half_tolerance(cases: list[Case], excuses: Excuses) -> Tolerance:
    """What PyTorch's own half precision run of the same calls says about rounding.

    The runtime must keep an output's bound in the median of each part: each row's logits, each head of each row of a state. The bound is
    the error that 99% of PyTorch's numbers keep, in the case where they are worst, so errors may be spread some four times as wide as
    PyTorch's: kernels that sum in half precision need two to three. A row's logits err together, by one factor of its last norm, so a
    row in a hundred of PyTorch's own would not keep that: the bound is at least SPREAD times the median of PyTorch's worst part. Nor is
    it less than what float32 rounds off in sums, which half precision's own error exceeds wherever there is one.
    Two scores tie where they lie no further apart than that run's largest errors of the same layer can move them.
    """
    bounds: dict[str, float] = {"": 0.0}
    ties: dict[str, float] = {"": 0.0}
    for case in cases:
        for name, noise in case.noise.items():
            bounds[name] = max(bounds.get(name, 0.0), _rounded_up(max(noise.usual, SPREAD * noise.part, noise.sums)))
            if excuses.is_score(name):
                ties[name] = max(ties.get(name, 0.0), 2 * noise.largest)
    return Tolerance(bounds, 0.0, "median", ties)


def _rounded_up(value: float) -> float:
    """`value` with three digits, never less; so that flags stay short."""
    if value == 0:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(value))
    return round(math.ceil(value * 10**digits) / 10**digits, digits)
