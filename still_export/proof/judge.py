"""The one bound of a proof, and the verdict on each output: multiples of the errors of PyTorch's own run in the same type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from still_export.package.calls import Arrays
from still_export.proof.absolute import LOGITS, Findings, layer_of
from still_export.proof.cases import TINY, Case, errors_of, same_best
from still_export.proof.constants import FEW_OUTPUTS, FEW_TIMES, PROOF_VERSION, ROUNDINGS, TIMES
from still_export.proof.verdict import WRONG, Check, Kind, Verdict
from still_kernels.ties import Choices, Pairs

NOTHING: Mapping[str, int] = {}
NO_STEPS: Mapping[str, str] = {}
MANTISSA = {"float16": 10, "bfloat16": 7}
"""Bits behind the leading one."""


class Bounds:
    """Bounds of row errors (`row_errors`) from those of PyTorch's own run of the same calls.

    A row may err TIMES as far as PyTorch's row, or as the root mean square of PyTorch's rows, of the output or of the case. The least bound
    is that of a sum in float32. A few tokens of a trained model amplify roundings many times, which one own run does not always
    show; if a row exceeds its bound, runs with disturbed inputs do (`DrawnOnce.disturb`).

    Args:
        cases: All cases of one subject.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        rows: dict[str, list[np.ndarray]] = {}
        largest: dict[str, float] = {}
        for case in cases:
            for call in case.own:
                for name, errors in call.items():
                    rows.setdefault(name, []).append(errors[:, np.isfinite(errors).all(0)].astype(np.float64))
            for name, size in case.largest.items():
                largest[name] = max(largest.get(name, 0.0), size)
        self.sums = {name: ROUNDINGS * float(np.finfo(np.float32).eps) / 2 * size for name, size in largest.items()}
        self.usual = {name: _root_mean_square(each) for name, each in rows.items()}
        most = {name: max((float(x[0].max(initial=0)) for x in each), default=0.0) for name, each in rows.items()}
        self.absolute = {name: max(TIMES * x, self.sums.get(name, 0.0)) for name, x in most.items()}
        """Largest bound of any number, by output."""

    def rows(self, case: Case, number: int, output: str) -> np.ndarray:
        """Bounds of the rows of a call's output, [2, ...] like `row_errors`."""
        own = (case.amplified or case.own)[number][output].astype(np.float64)
        own = np.where(np.isfinite(own), own, 0.0)  # an overflow of PyTorch's own run allows nothing
        usual = np.fmax(self.usual[output], _root_mean_square([c[output] for c in case.own if output in c]))
        bounds = TIMES * np.fmax(own, usual.reshape(2, *[1] * (own.ndim - 1)))
        return np.asarray(np.maximum(bounds, max(self.sums.get(output, 0.0), TINY)))


def _root_mean_square(errors: Sequence[np.ndarray]) -> np.ndarray:
    """Of errors [2, ...] over all rows that are finite, [2]."""
    rows = np.concatenate([*(each.reshape(2, -1) for each in errors), np.zeros((2, 1))], axis=1).astype(np.float64)
    return np.asarray(np.sqrt(np.square(rows[:, np.isfinite(rows).all(0)]).mean(1)))


@dataclass
class Judged:
    """The comparison of a case with a subject's outputs, after both are dropped.

    Args:
        errors: For each of `Case.pairs`, `row_errors` of every output.
        steps: For each, the size of one code, or the spacing of the type at a row's largest number, in the rows of states with fewer bits
            than float32, shaped as `errors`: what is stored may be the neighbouring number.
        sums: By output: (sum of all errors, their number).
        same: Where both have the same likeliest token, over all calls.
        found: Faults of the subject's outputs that need no bound.
        open_rows: Rows behind near ties at which the reference chose otherwise; they are not compared.
    """

    case: Case
    errors: list[Arrays]
    steps: list[Arrays]
    sums: dict[str, np.ndarray]
    same: np.ndarray
    found: Findings
    open_rows: int = 0
    otherwise: bool = False

    @classmethod
    def of(
        cls,
        case: Case,
        pairs: Pairs,
        by_token: Mapping[str, int] = NOTHING,
        scales: Mapping[str, str] = NO_STEPS,
        halves: Mapping[str, str] = NO_STEPS,
        turned: Sequence[Mapping[int, np.ndarray]] = (),
    ) -> Judged:
        """Compare `pairs`.

        Args:
            by_token: Axis of outputs that have a row for each token of a sequence.
            scales: By 8-bit state, the output with its scales.
            halves: By state in a type of 16 bits, this type.
            turned: For each pair by layer, the sequences [B] in which the subject chose otherwise at a near tie; later outputs are not
                compared.
        """
        judged = cls(case, [], [], {}, np.zeros(0, bool), Findings())
        for number, (expected, actual) in enumerate(pairs):
            judged.errors.append({})
            judged.steps.append({})
            for name, right in expected.items():
                judged.errors[-1][name], total = errors_of(right, actual[name])
                if (scale := expected.get(scales.get(name, ""))) is not None:
                    # The second error is along the row: of a row that differs in one code.
                    judged.steps[-1][name] = np.stack([scale, scale])
                if name in halves:
                    judged.steps[-1][name] = np.stack([_spacing(right, halves[name])] * 2)
                judged.sums[name] = judged.sums.get(name, 0) + np.array([total, right.size])
            judged.found.see(number, judged.errors[-1], expected, actual)
            if LOGITS in expected and case.unreported:
                judged.errors[-1][LOGITS][:, case.open_rows(expected)] = np.nan
            for name, axis in by_token.items():
                tokens = case.open_tokens(int(name.rpartition(".")[2]))
                if name in expected and tokens.any():
                    rows = np.moveaxis(judged.errors[-1][name], axis + 1, 2)[:, :, : tokens.shape[1]]
                    rows[:, tokens[:, : rows.shape[2]]] = np.nan
        judged.open_rows = _open_behind(judged.errors, turned)
        same = [same_best(*pair) for pair in pairs if LOGITS in pair[0]]
        judged.same = np.concatenate(same or [judged.same])
        return judged

    def report(self, output: str, bounds: Bounds) -> OutputReport:
        """The row of `output` that is nearest to its bound or furthest beyond."""
        each = [errors[output] for errors in self.errors]
        total, count = self.sums[output].tolist()
        worst, bound, call = 0.0, max(bounds.sums.get(output, 0.0), TINY), 1
        place: tuple[int, ...] = ()
        for number, errors in enumerate(each):
            if not errors.size:
                continue
            allowed = bounds.rows(self.case, number, output)
            if (step := self.steps[number].get(output)) is not None:
                allowed = np.maximum(allowed, step)
            with np.errstate(over="ignore"):  # a number that is not finite exceeds every bound
                shares = np.where(np.isinf(errors), np.inf, np.nan_to_num(errors) / allowed)
            at = np.unravel_index(int(shares.argmax()), errors.shape)
            if number == 0 or shares[at] > worst / bound:
                worst, bound = float(np.nan_to_num(errors[at], posinf=np.inf)), float(allowed[at])
                call, place = number + 1, tuple(int(i) for i in at[1:])
        return OutputReport(
            self.case.name,
            output,
            max((float(np.nan_to_num(errors[0], posinf=np.inf).max(initial=0)) for errors in each), default=0.0),
            total / count if count else 0.0,
            self.case.own_mean[output],
            bound,
            worst,
            call,
            place,
            worst <= bound,
        )


@dataclass
class OutputReport:
    """Errors of one output over all calls of a case.

    `own_mean_abs` is that of PyTorch's own run. `worst` is the error of the row that is nearest to its `bound` or furthest beyond, in the
    call `worst_call`, counted from 1, at the indices `worst_place`. `run` is what was compared: a graph in float32, or a runtime.
    """

    case: str
    output: str
    max_abs: float
    mean_abs: float
    own_mean_abs: float
    bound: float
    worst: float
    worst_call: int
    worst_place: tuple[int, ...]
    passed: bool
    run: str = ""

    @property
    def of_bound(self) -> float:
        """The judged error divided by its bound."""
        return self.worst / self.bound if self.bound else 0.0 if self.worst == 0 else math.inf

    def describe(self) -> str:
        """One line about its worst error."""
        place = f"{self.case}, {self.output}: call {self.worst_call}, row {list(self.worst_place)}"
        return f"{self.run + ', ' if self.run else ''}{place} is {self.worst:.1e} off, bound {self.bound:.1e}"


@dataclass
class Report:
    """The verdict on a package.

    Args:
        first_diverging_layer: The lowest one with a failed state.
        command: Polygraphy's.
        not_asked: What the proof leaves open, one line each; printed with the verdict.
        asked: What was asked, one line each.
    """

    outputs: list[OutputReport]
    top1: float
    own_top1: float
    selections: Choices
    checks: list[Check]
    first_diverging_layer: int | None
    command: str
    not_asked: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    passed: bool = field(init=False)

    def __post_init__(self) -> None:
        good = all(r.passed for r in self.outputs) and all(c.passed for c in self.checks)
        self.passed = good and not self.selections.wrong

    @classmethod
    def empty(cls) -> Report:
        """A report on nothing."""
        return cls([], 1.0, 1.0, Choices(), [], None, "")

    def including(self, verdict: Verdict) -> Report:
        """This report with the checks of another part of the proof."""
        new = [line for line in verdict.not_asked if line not in self.not_asked]
        return replace(self, checks=self.checks + verdict.checks, not_asked=self.not_asked + new)

    def with_run(self, name: str, run: Report) -> Report:
        """This report with that of a further run, called `name`."""
        named = [replace(check, name=f"{name}: {check.name}") for check in run.checks]
        return self.joined(replace(run, outputs=[replace(each, run=name) for each in run.outputs], checks=named))

    def joined(self, other: Report) -> Report:
        """Both reports in one."""
        selections = Choices()
        selections.add(self.selections)
        selections.add(other.selections)
        layers = [x for x in (self.first_diverging_layer, other.first_diverging_layer) if x is not None]
        return Report(
            self.outputs + other.outputs,
            min(self.top1, other.top1),
            min(self.own_top1, other.own_top1),
            selections,
            self.checks + other.checks,
            min(layers, default=None),
            other.command or self.command,
            [*dict.fromkeys(self.not_asked + other.not_asked)],
            self.asked + other.asked,
        )

    @property
    def mismatches(self) -> list[OutputReport]:
        """Failed outputs, the furthest beyond its bound first."""
        return sorted((each for each in self.outputs if not each.passed), key=lambda each: -each.of_bound)

    @property
    def verdict(self) -> str:
        """One sentence: the kinds of what failed, and whether the numbers hold if others did."""
        if self.passed:
            return "PASSED"
        failed = {check.kind for check in self.checks if not check.passed}
        if self.mismatches or self.selections.wrong:
            failed.add(Kind.NUMBERS)
        hold = ["every number that was compared is within its bound"] * (not failed & {Kind.NUMBERS, Kind.REFERENCE})
        return f"FAILED: {'; '.join([*(wrong for kind, wrong in WRONG.items() if kind in failed), *hold])}"

    @property
    def nearest(self) -> OutputReport | None:
        """The output that is nearest to its bound or furthest beyond."""
        return max(self.outputs, key=lambda each: each.of_bound, default=None)

    @property
    def _only_outputs(self) -> bool:
        """Whether nothing failed but outputs."""
        return not self.passed and all(check.passed for check in self.checks) and not self.selections.wrong

    @property
    def may_be_storing(self) -> bool:
        """Whether nothing failed but a few outputs: a number that is stored the other way is in few of them."""
        return self._only_outputs and FEW_OUTPUTS * len(self.mismatches) <= len(self.outputs)

    @property
    def may_be_rounding(self) -> bool:
        """Whether nothing failed but outputs that are a few times beyond their bounds."""
        return self._only_outputs and self.mismatches[0].of_bound <= FEW_TIMES

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "proof_version": PROOF_VERSION,
            **Verdict(self.checks, self.not_asked).to_dict(),
            "asked": self.asked,
            "nearest": None if self.nearest is None else {**vars(self.nearest), "share": self.nearest.of_bound},
            "top1_agreement": self.top1,
            "pytorch_top1_agreement": self.own_top1,
            "selections": vars(self.selections),
            "first_diverging_layer": self.first_diverging_layer,
            "polygraphy": self.command,
            "outputs": [vars(o) for o in self.outputs],
        }


def _spacing(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Distance [...] between two numbers of a type of 16 bits at the largest of each of `rows` [..., D]."""
    largest = np.abs(rows.astype(np.float32, copy=False)).max(-1, initial=0)
    return np.asarray(np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1] - 1 - MANTISSA[dtype]), 0))


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
