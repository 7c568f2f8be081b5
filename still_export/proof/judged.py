"""Results of comparisons: of a case, of an output, of a package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from still_export.package.calls import Arrays
from still_export.proof.absolute import LOGITS, Findings, layer_of
from still_export.proof.cases import TINY, Case, cosine_sums, errors_of, same_best
from still_export.proof.constants import PROOF_VERSION
from still_export.proof.judge import Bounds
from still_export.proof.verdict import Check, Verdict
from still_kernels.ties import Choices, Pairs

NOTHING: Mapping[str, int] = {}
NO_SUMS: Mapping[str, float] = {}


@dataclass
class Judged:
    """The comparison of a case with a target's outputs, after both are dropped.

    Args:
        errors: For each of `Case.pairs`, `row_errors` of every output.
        units: For each, allowed errors of rows of sums by the rounding of features, shaped as `errors`.
        least: For each, least allowed errors of rows by layer, shaped as `errors`.
        sums: By output: (sum of all errors, their number; products of both sides, of PyTorch's with itself, of the target's with itself).
        feature_rounding: By output, the summed error of all its numbers by the rounding of features.
        same: Where both have the same likeliest token, over all calls.
        found: Faults of the target's outputs that need no bound.
        open_rows: Rows after near ties at which the reference chose otherwise; they are not compared.
    """

    case: Case
    errors: list[Arrays]
    units: list[Arrays]
    least: list[Arrays]
    sums: dict[str, np.ndarray]
    same: np.ndarray
    found: Findings
    open_rows: int = 0
    guessed: bool = False
    feature_rounding: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        case: Case,
        pairs: Pairs,
        by_token: Mapping[str, int] = NOTHING,
        summed: Mapping[str, float] = NO_SUMS,
        turned: Sequence[Mapping[int, np.ndarray]] = (),
        times: float = 0.0,
        written: Mapping[str, float] = NO_SUMS,
        averaged: Mapping[str, float] = NO_SUMS,
    ) -> Judged:
        """Compare `pairs`.

        Args:
            by_token: Axis of outputs that have a row for each token of a sequence.
            summed: For outputs that are sums over tokens, the additional relative error of a row.
            times: Least allowed relative error of a row of these, in multiples of that of PyTorch's own rows.
            written: By output, the relative error by roundings that a whole row shares.
            averaged: For outputs whose terms are rounded products of features, the largest relative error of a term; half of it in the
                mean.
            turned: For each pair by layer, the sequences [B] in which the target chose otherwise at a near tie; later outputs are not
                compared.
        """
        errors: list[Arrays] = []
        units: list[Arrays] = []
        least: list[Arrays] = []
        sums: dict[str, np.ndarray] = {}
        feature_rounding: dict[str, float] = {}
        found = Findings()
        for number, (expected, actual) in enumerate(pairs):
            errors.append({})
            units.append({})
            least.append({})
            for name, right in expected.items():
                errors[-1][name], total = errors_of(right, actual[name])
                if name in summed or name in written:
                    size = np.stack([np.abs(right).max(-1), np.linalg.norm(right, axis=-1)])
                    size = np.where(np.isfinite(size), size, 0)  # otherwise it would allow anything
                    if name in written:
                        least[-1][name] = written[name] * size
                    else:
                        units[-1][name] = summed[name] * size
                        if times:
                            least[-1][name] = times * _of_itself(case.own[number][name], size) * size
                sums[name] = sums.get(name, 0) + np.array([total, right.size, *cosine_sums(right, actual[name])])
                if name in averaged:
                    sizes = np.abs(right, dtype=np.float64)
                    feature_rounding[name] = feature_rounding.get(name, 0.0) + averaged[name] / 2 * float(
                        sizes[np.isfinite(sizes)].sum()
                    )
            found.see(number, errors[-1], expected, actual)
            if LOGITS in expected and case.unreported:
                errors[-1][LOGITS][:, case.open_rows(expected)] = np.nan
            for name, axis in by_token.items():
                tokens = case.open_tokens(int(name.rpartition(".")[2]))
                if name in expected and tokens.any():
                    rows = np.moveaxis(errors[-1][name], axis + 1, 2)[:, :, : tokens.shape[1]]
                    rows[:, tokens[:, : rows.shape[2]]] = np.nan
        open_rows = _open_behind(errors, turned)
        same = [same_best(*pair) for pair in pairs if LOGITS in pair[0]]
        top = np.concatenate(same or [np.zeros(0, bool)])
        return cls(case, errors, units, least, sums, top, found, open_rows, feature_rounding=feature_rounding)

    def distance(self, output: str) -> float:
        """Squared difference of both sides relative to PyTorch's square."""
        product, right, other = self.sums[output].tolist()[2:]
        return float((right + other - 2 * product) / max(right, TINY))

    def errors_of_output(self, output: str) -> list[np.ndarray]:
        """The judged errors of `output`, call by call."""
        each = [(errors[output], units.get(output)) for errors, units in zip(self.errors, self.units, strict=True)]
        return [errors if unit is None else np.maximum(errors - unit, np.minimum(errors, 0)) for errors, unit in each]

    def report(self, output: str, bounds: Bounds) -> OutputReport:
        """Errors of `output`, and whether they are within bounds."""
        each = [errors[output] for errors in self.errors]
        total, count, product, *norms = self.sums[output].tolist()
        least = [rows[output] for rows in self.least if output in rows]
        verdict = bounds.judge(self.case, output, self.errors_of_output(output), least)
        mean = total / count if count else 0.0
        most = bounds.mean(self.case, output) + self.feature_rounding.get(output, 0.0) / max(count, 1)
        if verdict.share <= 1 and mean > most:
            verdict = replace(verdict, worst=mean, bound=most, call=0, place=(), median=False)
        return OutputReport(
            self.case.name,
            output,
            max(float(np.nan_to_num(errors[0], posinf=np.inf).max(initial=0)) for errors in each),
            mean,
            product / norm if (norm := math.sqrt(norms[0] * norms[1])) else 1.0,
            self.case.own_mean[output],
            verdict.bound,
            verdict.worst,
            verdict.call,
            verdict.place,
            verdict.median,
            verdict.share <= 1,
        )


@dataclass
class OutputReport:
    """Errors of one output over all calls of a case.

    `own_mean_abs` is that of PyTorch's own run in the package's type. `worst` is the error of the row that is nearest to its `bound` or
    furthest beyond, in the call `worst_call`, counted from 1, at the indices `worst_place`; with `by_median` the median of a head's rows;
    in call 0 the mean of all numbers.
    """

    case: str
    output: str
    max_abs: float
    mean_abs: float
    cosine: float
    own_mean_abs: float
    bound: float
    worst: float
    worst_call: int
    worst_place: tuple[int, ...]
    by_median: bool
    passed: bool

    @property
    def of_bound(self) -> float:
        """The judged error divided by its bound."""
        return self.worst / self.bound if self.bound else 0.0 if self.worst == 0 else math.inf

    def describe(self) -> str:
        """One line about its worst error."""
        part = "median error of head" if self.by_median else f"call {self.worst_call}, error of row"
        part = part if self.worst_call else "mean error of all rows"
        place = f"{self.case}, {self.output}: {part} {list(self.worst_place)}"
        return f"{place} {self.worst:.1e}, bound {self.bound:.1e}"


@dataclass
class Report:
    """The verdict on a package.

    Args:
        first_diverging_layer: The lowest one with a failed state.
        command: Polygraphy's.
        not_asked: What the proof leaves open, one line each; printed with the verdict.
    """

    outputs: list[OutputReport]
    top1: float
    own_top1: float
    selections: Choices
    checks: list[Check]
    first_diverging_layer: int | None
    command: str
    not_asked: list[str] = field(default_factory=list)
    passed: bool = field(init=False)

    def __post_init__(self) -> None:
        good = all(r.passed for r in self.outputs) and all(c.passed for c in self.checks)
        self.passed = good and not self.selections.wrong

    def including(self, verdict: Verdict) -> Report:
        """This report with the checks of another part of the proof."""
        return replace(self, checks=self.checks + verdict.checks, not_asked=self.not_asked + verdict.not_asked)

    @property
    def mismatches(self) -> list[OutputReport]:
        return [each for each in self.outputs if not each.passed]

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "proof_version": PROOF_VERSION,
            "top1_agreement": self.top1,
            "pytorch_half_top1_agreement": self.own_top1,
            "selections": vars(self.selections),
            **Verdict(self.checks, self.not_asked).to_dict(),
            "first_diverging_layer": self.first_diverging_layer,
            "polygraphy": self.command,
            "outputs": [vars(o) for o in self.outputs],
        }


def _of_itself(own: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Relative errors of PyTorch's rows [2, 1, ..], by root mean squares, so that small rows count little; 0 if all rows are zeros."""
    rows, sizes = (np.where(np.isfinite(own), x, 0).reshape(2, -1).astype(np.float64) for x in (own, size))
    size = np.linalg.norm(sizes, axis=1)
    share = np.divide(np.linalg.norm(rows, axis=1), size, out=np.zeros(2), where=size > 0)
    return np.asarray(share.reshape(2, *[1] * (own.ndim - 1)))


def _open_behind(errors: Sequence[Arrays], turned: Sequence[Mapping[int, np.ndarray]]) -> int:
    """Set errors after an unexplained choice (its layer, later ones and logits, from its call on) to NaN; returns the number of rows."""
    count, lowest = 0, np.zeros(0)
    for call, layers in zip(errors, turned, strict=False):
        for layer, sequences in layers.items():
            lowest = lowest if lowest.size else np.full(len(sequences), np.inf)
            lowest = np.where(sequences, np.minimum(lowest, layer), lowest)
        if not np.isfinite(lowest).any():
            continue
        for name, found in call.items():
            if name == LOGITS or layer_of(name) < np.inf:
                behind = np.flatnonzero(np.isfinite(lowest) & (lowest <= layer_of(name)))
                count += int((~np.isnan(found[0, behind])).sum())
                found[:, behind] = np.nan
    return count
