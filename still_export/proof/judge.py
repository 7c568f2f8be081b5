"""Bounds of a subject's errors: multiples of the errors of PyTorch's own run in the package's type, row by row and in the median.

Pure functions of arrays; the multiples are in `constants`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from still_export.proof.absolute import LOGITS
from still_export.proof.cases import TINY, Case
from still_export.proof.constants import (
    CHANCE,
    EVEN,
    FEWEST,
    LOGITS_MEDIAN,
    MEDIAN,
    ROUNDINGS,
    ROW,
    SHARP_FEW,
    SHARP_MEAN,
    SHARP_MEDIAN,
    SHARP_ROW,
    TAIL,
    TAIL_MEDIAN,
)

DIGITS = 3


@dataclass(frozen=True)
class Worst:
    """On one output of a case. `worst` is the error that is nearest to its `bound` or furthest beyond: of a row in the call `call`, counted
    from 1, or with `median` the median of a head's rows. `place` are the indices of the row, or the head."""

    worst: float
    bound: float
    call: int = 1
    place: tuple[int, ...] = ()
    median: bool = False

    @property
    def share(self) -> float:
        return self.worst / max(self.bound, TINY)


class Bounds:
    """Bounds from the rounding errors of PyTorch's own run of the same calls.

    Args:
        cases: All cases of the package.
        coarse: Expected errors of this kind of runtime, in multiples of PyTorch's own.
        sharp: Layers read the runtime's own input, and PyTorch uses its choices, so that errors are one layer's rounding.
        fixed: Outputs that are states of fixed size.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        coarse: float = 1.0,
        dtype: str = "float16",
        sharp: bool = False,
        fixed: Collection[str] = (),
    ) -> None:
        self.fixed = fixed
        self.coarse, self.row, self.half = coarse, SHARP_ROW if sharp else ROW[dtype], dtype == "float16"
        self.sharp = sharp
        self.median = SHARP_MEDIAN if sharp else MEDIAN
        self.logits = LOGITS_MEDIAN if self.half and coarse == 1 else MEDIAN * coarse
        rows: dict[str, list[np.ndarray]] = {}
        parts: dict[str, list[np.ndarray]] = {}
        largest: dict[str, float] = {}
        for case in cases:
            for call in case.own:
                for name, errors in call.items():
                    errors = self._own(name, errors)
                    rows.setdefault(name, []).append(errors[:, np.isfinite(errors).all(0)].astype(np.float64))
                    if self.half and not sharp and name != LOGITS:
                        parts.setdefault(name, []).append(_part_medians(_by_head(errors)))
            for name, size in case.largest.items():
                largest[name] = max(largest.get(name, 0.0), size)
        self.sums = {name: ROUNDINGS * float(np.finfo(np.float32).eps) / 2 * size for name, size in largest.items()}
        found = {name: np.concatenate([*each, np.zeros((2, 1))], axis=1) for name, each in rows.items()}
        self.usual = {name: np.sqrt(np.square(each).mean(1)) for name, each in found.items()}
        # Where PyTorch's own run restarted from the reference's state after a tie, it has no error to measure.
        self.ordered = {name: np.sort(each[:, each.any(0)].astype(np.float32)) for name, each in found.items()}
        self.tail = {name: TAIL * found[name].max(1) for name in parts}
        self.tail_median = {name: TAIL_MEDIAN * np.concatenate(each, axis=1).max(1) for name, each in parts.items()}
        self.absolute = {
            name: _rounded_up(max(self.row * coarse * float(each[0].max()), self._sums(name)))
            for name, each in found.items()
        }
        """Largest bound of any number, by output."""

    def judge(self, case: Case, output: str, calls: Sequence[np.ndarray], least: Sequence[np.ndarray] = ()) -> Worst:
        """Judge one output by `row_errors` of all calls of a case: every row, and the median of each head's rows.

        Args:
            least: Smallest bound of rows, for each call.
        """
        usual = self._usual(output, case)
        found = [Worst(0.0, float(self._row_bounds(output, np.zeros((2, 1)), usual)[0, 0]))]
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for number, errors in enumerate(calls):
            own = self._own(output, case.own[number][output])
            if errors.size:
                bounds = self._row_bounds(output, own, usual)
                if least:
                    bounds = np.maximum(bounds, least[number])
                # A non-finite number exceeds every bound.
                with np.errstate(over="ignore"):
                    shares = np.where(np.isinf(errors), np.inf, np.nan_to_num(errors) / bounds)
                at = np.unravel_index(int(shares.argmax()), errors.shape)
                place = tuple(int(i) for i in at[1:])
                found.append(
                    Worst(float(np.nan_to_num(errors[at], posinf=np.inf)), float(bounds[at]), number + 1, place)
                )
                parts.append((_by_head(errors), _by_head(own)))
        worst = max(found, key=lambda verdict: verdict.share)
        if parts and worst.share <= 1:  # a row has a place to report
            errors, own = (np.concatenate(side, axis=2) for side in zip(*parts, strict=True))
            times = self.logits if output == LOGITS else self.median * self.coarse
            # Rows that are heads or channels of one sequence read the same tokens: their errors come together.
            together = calls[0].shape[2] if output != LOGITS and calls[0].ndim == 3 else 1
            usual = np.fmax(_medians(own), self._usual_medians(output, errors, together))
            bounds = np.maximum(times * usual, self._sums(output))
            bounds = np.maximum(bounds, self.tail_median.get(output, np.zeros(2))[:, None])
            medians = _part_medians(errors)
            at = np.unravel_index(int((medians / np.maximum(bounds, TINY)).argmax()), medians.shape)
            median = Worst(float(medians[at]), float(bounds[at]), place=(int(at[1]),), median=True)
            worst = max(worst, median, key=lambda verdict: verdict.share)
        return worst

    def mean(self, case: Case, output: str) -> float:
        """Bound of the mean error of an output; infinite for whole runs, whose choices may differ."""
        if not self.sharp:
            return math.inf
        rows = sum(self._draws(output, call[output][0]) for call in case.own if output in call)
        times = SHARP_MEAN + SHARP_FEW / max(rows, 1)
        return max(times * self.coarse * case.own_mean[output], self._sums(output))

    def _draws(self, output: str, errors: np.ndarray) -> int:
        """Number of independent draws in `errors` [B, ..]: rows, or heads of a state of fixed size, whose rows err together."""
        if output not in self.fixed:
            return int((~np.isnan(errors)).sum())
        return int((~np.isnan(errors)).reshape(*errors.shape[: min(2, errors.ndim - 1)], -1).any(-1).sum())

    def row_bounds(self, case: Case, number: int, output: str) -> np.ndarray:
        """Bounds of rows of a call's output, [2, ...] like `row_errors`."""
        return self._row_bounds(output, self._own(output, case.own[number][output]), self._usual(output, case))

    def arguments(self, half: bool) -> list[str]:
        """Polygraphy's flags: the median in half precision, where a tie may change whole rows, else the maximum."""
        bounds = [f"{name}:{bound}" for name, bound in self.absolute.items()]
        flags = ["--atol", "0.0", *bounds, "--rtol", "0.0", "--check-error-stat", "median" if half else "elemwise"]
        return [*flags, "--infinities-compare-equal"]

    def _own(self, output: str, errors: np.ndarray) -> np.ndarray:
        """PyTorch's row errors [2, ...]; the second is raised to its expected size for random errors of the first's size, because it may be
        small by chance (features that PyTorch normalizes in float32 sum to a constant)."""
        if not self.half or (output == LOGITS and not self.sharp):
            return errors
        return np.stack([errors[0], np.maximum(errors[1], errors[0] / (1.0 if output == LOGITS else EVEN))])

    def _usual(self, output: str, case: Case) -> np.ndarray:
        """Root mean square of PyTorch's errors over all rows, or in float32 over the rows of this case if that is larger."""
        if output == LOGITS or output in self.tail:
            return self.usual[output]
        own = [call[output].reshape(2, -1) for call in case.own if output in call]
        rows = np.concatenate([*own, np.zeros((2, 1))], axis=1).astype(np.float64)
        rows = rows[:, np.isfinite(rows).all(0)]
        return np.fmax(self.usual[output], np.sqrt(np.square(rows).mean(1)))

    def _row_bounds(self, output: str, own: np.ndarray, usual: np.ndarray) -> np.ndarray:
        """Bounds for errors [2, ...]."""
        own = np.where(np.isfinite(own), own, 0.0)  # an overflow of PyTorch's own run allows nothing
        across = (2, *[1] * (own.ndim - 1))
        usual, tail = (side.reshape(across) for side in (usual, self.tail.get(output, np.zeros(2))))
        bounds = np.maximum(self.row * np.fmax(own, usual), tail)
        return np.asarray(np.maximum(self.coarse * bounds, max(self._sums(output), TINY)))

    def _usual_medians(self, output: str, errors: np.ndarray, together: int) -> np.ndarray:
        """Upper limits [2, heads] of the medians of PyTorch's rows, for parts [2, heads, n]; `together` rows are one draw."""
        ordered, rows = self.ordered[output], (~np.isnan(errors)).sum(2)
        size = ordered.shape[1]
        at = np.ceil(size * _above(np.maximum(rows // together, 1))).astype(int) - 1
        return np.take_along_axis(ordered, at, axis=1) if size else np.zeros(rows.shape)

    def _sums(self, output: str) -> float:
        return self.sums.get(output, 0.0)


def _by_head(errors: np.ndarray) -> np.ndarray:
    """Rows [2, heads, n] of a state's [2, B, H, ..]; logits [2, B, T] and outputs without heads are one part."""
    heads = errors.shape[2] if errors.ndim > 3 else 1
    return errors.swapaxes(1, 2).reshape(2, heads, -1) if heads > 1 else errors.reshape(2, 1, -1)


def _part_medians(rows: np.ndarray) -> np.ndarray:
    """Medians of [2, heads, n]; 0 for a head with too few rows."""
    few = np.isfinite(rows).sum(2) < FEWEST
    return np.where(few, 0.0, np.nan_to_num(_medians(rows), posinf=np.inf))


def _above(count: np.ndarray) -> np.ndarray:
    """Quantile that the median of `count` draws exceeds with probability CHANCE at most."""
    # If a fraction q lies above it, at least half of n draws do with probability (4 q (1 - q))^(n / 2) at most (Chernoff, "A Measure of
    # Asymptotic Efficiency", 1952).
    return np.asarray((1 + np.sqrt(1 - CHANCE ** (2 / count))) / 2)


def _medians(rows: np.ndarray) -> np.ndarray:
    """Medians without NaN; NumPy's nanmedian loops over rows."""
    ordered = np.sort(rows, axis=2)  # NaN last
    count = (~np.isnan(rows)).sum(2, keepdims=True)
    if not rows.shape[2]:
        return np.full(rows.shape[:2], np.nan)
    middle = np.maximum(np.concatenate([(count - 1) // 2, count // 2], axis=2), 0)
    return np.asarray(np.take_along_axis(ordered, middle, axis=2).mean(2))


def _rounded_up(value: float) -> float:
    """`value` rounded up to three digits, so that flags stay short."""
    if value == 0:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(value))
    return round(math.ceil(value * 10**digits) / 10**digits, digits)
