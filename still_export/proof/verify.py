"""The proof of a package: PyTorch and the target on the same inputs, compared row by row of every output."""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import UnsupportedError
from still_export.graph.quantization.policy import rounds_activations
from still_export.package.calls import Arrays
from still_export.package.folder import Package
from still_export.package.staging import staged_files
from still_export.proof.absolute import (
    LOGITS,
    Findings,
    constant_check,
    finite_check,
    likeliest_check,
    overflow_checks,
    rounding_check,
)
from still_export.proof.calls_file import CallsFile
from still_export.proof.cases import (
    EMPTY,
    Case,
    CaseSource,
    Follow,
    cosine_sums,
    errors_of,
    fixed_pair,
    same_best,
)
from still_export.proof.codes import has_narrow_caches
from still_export.proof.selections import told_by
from still_export.proof.sessions import Guessing, Session, Target, empty_unread
from still_export.proof.shelf import give_back
from still_export.proof.tolerance import Bounds
from still_export.proof.verdict import Check, Verdict
from still_graphs.ops import OPS
from still_graphs.states import StateTable
from still_kernels.registry import ties_of
from still_kernels.ties import Choices, Pairs, expected_ties

DECODE_STEPS = 256
"""More than a chunk, so that a promotion happens between plain steps."""

ATTEMPTS = 5
"""Answers of PyTorch tried where a near tie made the runtimes choose differently; see `Verifier._settled`."""


NOTHING: Mapping[str, int] = {}

UNIT = 2.0**-9
"""Of itself that a sum of features (`StateSpec.features`) may err in float16 on a GPU, beside what PyTorch's own run says: bfloat16's."""


@dataclass
class Judged:
    """What is left of a case and of a target's outputs when both are forgotten.

    Args:
        case: Without its calls.
        errors: Of each of `Case.pairs`, `row_errors` of every output.
        units: Of each, what rows of sums may err by the rounding of their features, as `errors`.
        sums: By output, the sum of all errors and how many they are; products of both sides, of PyTorch's with itself, of the other's.
        same: Where both find the same token the likeliest, over all calls.
        found: What is absolutely wrong of the target's outputs.
    """

    case: Case
    errors: list[Arrays]
    units: list[Arrays]
    sums: dict[str, np.ndarray]
    same: np.ndarray
    found: Findings

    @classmethod
    def of(
        cls, case: Case, pairs: Pairs, by_token: Mapping[str, int] = NOTHING, summed: Collection[str] = ()
    ) -> Judged:
        """What `pairs` say.

        Args:
            by_token: The axes of outputs that have a row for each token of a sequence.
            summed: Outputs that the target sums of features in bfloat16.
        """
        errors: list[Arrays] = []
        units: list[Arrays] = []
        sums: dict[str, np.ndarray] = {}
        found = Findings()
        for number, (expected, actual) in enumerate(pairs):
            errors.append({})
            units.append({})
            for name, right in expected.items():
                errors[-1][name], total = errors_of(right, actual[name])
                if name in summed:
                    units[-1][name] = UNIT * np.stack([np.abs(right).max(-1), np.linalg.norm(right, axis=-1)])
                sums[name] = sums.get(name, 0) + np.array([total, right.size, *cosine_sums(right, actual[name])])
            found.see(number, errors[-1], expected, actual)
            if LOGITS in expected and case.untold:
                errors[-1][LOGITS][:, case.open_rows(expected)] = np.nan
            for name, axis in by_token.items():
                tokens = case.open_tokens(int(name.rpartition(".")[2]))
                if name in expected and tokens.any():
                    rows = np.moveaxis(errors[-1][name], axis + 1, 2)[:, :, : tokens.shape[1]]
                    rows[:, tokens[:, : rows.shape[2]]] = np.nan
        same = [same_best(*pair) for pair in pairs if LOGITS in pair[0]]
        return cls(case, errors, units, sums, np.concatenate(same or [np.zeros(0, bool)]), found)

    def held(self, output: str) -> list[np.ndarray]:
        """Of each call the errors of `output` that are held to bounds."""
        each = [(errors[output], units.get(output)) for errors, units in zip(self.errors, self.units, strict=True)]
        return [errors if unit is None else np.maximum(errors - unit, np.minimum(errors, 0)) for errors, unit in each]

    def report(self, output: str, bounds: Bounds) -> OutputReport:
        """Errors of `output`, and whether it keeps its bounds."""
        each = [errors[output] for errors in self.errors]
        total, count, product, *norms = self.sums[output].tolist()
        verdict = bounds.judge(self.case, output, self.held(output))
        return OutputReport(
            self.case.name,
            output,
            max(float(np.nan_to_num(errors[0], posinf=np.inf).max(initial=0)) for errors in each),
            total / count if count else 0.0,
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
    furthest beyond, in the call `worst_call`, counted from 1, at the indices `worst_place`; with `by_median` the median of a head's rows.
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

    def told(self) -> str:
        """Where its worst error is, in a line."""
        part = "median error of head" if self.by_median else f"call {self.worst_call}, error of row"
        place = f"{self.case}, {self.output}: {part} {list(self.worst_place)}"
        return f"{place} {self.worst:.1e}, bound {self.bound:.1e}"


@dataclass
class Report:
    """The verdict on a package.

    Args:
        first_diverging_layer: The lowest one with a failed state.
        command: Polygraphy's.
        not_asked: What the proof leaves open, one line each; printed beside PASSED.
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
        self.passed = good and not self.selections.wrong and not self.selections.too_many

    def including(self, verdict: Verdict) -> Report:
        """With the checks of another part of the proof."""
        return replace(self, checks=self.checks + verdict.checks, not_asked=self.not_asked + verdict.not_asked)

    @property
    def mismatches(self) -> list[OutputReport]:
        """Outputs that do not keep their bounds."""
        return [each for each in self.outputs if not each.passed]

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "passed": self.passed,
            "top1_agreement": self.top1,
            "pytorch_half_top1_agreement": self.own_top1,
            "selections": {**vars(self.selections), "too_many": self.selections.too_many},
            **Verdict(self.checks, self.not_asked).to_dict(),
            "first_diverging_layer": self.first_diverging_layer,
            "polygraphy": self.command,
            "outputs": [vars(o) for o in self.outputs],
        }


class Verifier:
    """Compares a package, run by its runtime, with the PyTorch model it was exported from.

    Args:
        package: What to verify.
        cases: What is asked, and PyTorch's answers.
        target: The package's runtime.
        replays: Tokens of the runtime's own checks.
    """

    def __init__(self, package: Package, cases: CaseSource, target: Target, replays: int = DECODE_STEPS) -> None:
        check_dtype(package)
        self.package, self.cases, self.target, self.replays = package, cases, target, replays
        self.ties = ties_of(package.manifest)
        table = StateTable.of(package.manifest)
        self.by_token = {s.present: s.growth["axis"] for s in table if s.growth and _by_token(s.growth)}
        target.watch = tuple(op.watched for op in self.ties.each if op.watched)
        rounded = has_narrow_caches(package.manifest) or rounds_activations(package.manifest)
        self.dtype = "float16" if rounded else package.manifest["model"]["dtype"]
        halves = target.coarse > 1 and package.manifest["model"]["dtype"] == "float16"
        sums = {(op.name, state.name) for op in OPS.values() for state in op.states if state.features and halves}
        self.summed = {s.present for s in table if (s.op, s.name.rpartition(".")[0]) in sums}

    def run(self, folder: Path, progress: Callable[[str], None] = lambda done: None) -> Report:
        """Compare every case, save the calls to `folder` (inputs.json, outputs.json) for polygraphy's own command, and judge.

        Args:
            folder: Made where missing; polygraphy.sh there is the command.
            progress: Told each finished case.
        """
        selections = Choices()
        checks: list[Check] = []
        judged: dict[int, Judged] = {}
        guessed: dict[int, Judged] = {}
        folder.mkdir(parents=True, exist_ok=True)
        with self.target.open() as session:  # a runtime that is missing says so before PyTorch takes its time
            told = self._begun(session)
        del session  # what it holds is more than opening it costs
        give_back()
        drawn = self.cases.draw(range(self.cases.count), told)  # one of them at a time has its weights in memory
        with staged_files(folder) as work, CallsFile(work, self.target) as calls, self.target.open() as session:
            guessing = Guessing(session.model) if session.model.guesses else None
            gc.collect()  # modules of PyTorch refer to each other
            give_back()
            settled = self._settled(session, drawn, selections, progress, told)
            del told  # with what the target answered already
            for number, case, pairs, _ in settled:
                judged[number] = Judged.of(case, pairs, self.by_token, self.summed)
                del pairs
                calls.add(case)
                if case.steps and self.replays:
                    checks += session.checks(case.feeds[0], min(self.replays, len(case.steps)))
                if case.steps and guessing is not None:
                    guessed[number] = self._guessed(guessing, case, selections)
                case.forget()
                give_back()
            heads = self._heads(session, checks)
            checks += self.target.checks(self.replays)
            every = [found[number] for found in (judged, guessed) for number in sorted(found)]
            bounds = Bounds([each.case for each in every], self.target.coarse, self.dtype)
            command = self.target.command()
            command += ["--load-inputs", str(folder / "inputs.json"), "--load-outputs", str(folder / "outputs.json")]
            line = shlex.join(command + bounds.arguments(half=self.package.manifest["model"]["dtype"] != "float32"))
            (work / "polygraphy.sh").write_text(line + "\n", encoding="utf-8")
        report = self._judge(every, bounds, selections, checks, line)
        return replace(report, outputs=[*report.outputs, *heads])

    def _begun(self, session: Session) -> Follow:
        """What the target selects in each case before its first step. PyTorch, which takes most of the time, then answers once."""
        if not self.cases.follows or not self.ties.shown.each:
            return EMPTY
        return told_by(session, self.cases, self.ties)

    def _settled(
        self,
        session: Session,
        drawn: list[Case],
        total: Choices,
        progress: Callable[[str], None],
        told: Follow = EMPTY,
    ) -> Iterator[tuple[int, Case, Pairs, Pairs]]:
        """Cases, `drawn` or drawn again, on which both runtimes choose the same, as far as single numbers are compared: the number, the
        case, its outputs, and those of the steps in which the target chose otherwise. Each as soon as it is known, and not kept here.

        Where two scores differ by less than rounding, either choice is right and everything after it differs. So PyTorch chooses what the
        target did, `told` before it answered or on the same prompt once more: each choice is judged by what PyTorch would have chosen
        there, and all numbers are compared. Steps go on from PyTorch's state where it chose otherwise (`Case.pairs`).

        Answers from a file follow what a runtime had said before, or nobody, and experts only where the runtime tells them: else the logits
        of tokens whose experts nearly tie are not held, nor what later layers keep of them. There another prompt is drawn if what differs
        within a call, the prompt's of steps among them, exceeds the bounds of the case itself, or other selections differ by more than a
        tie: those of later layers and chunks read what the tie turned (PyTorch's own float16 run does so, too). A selection that differs
        by more than a tie where nothing ties, or in a step, is kept: it is a mismatch, as is what is left in the last prompt. Ties of
        every prompt count, judged or not.
        """
        left, told = list(range(self.cases.count)), dict(told)
        for attempt in range(ATTEMPTS):
            again, follow = [], {}
            drawn.reverse()
            for number in left:
                case = drawn.pop()
                first = None
                if number in told:
                    first, told[number] = told[number].first, replace(told[number], first=None)
                if first is not None and len(case.feeds) == 1 and not self.target.watch:  # asked already
                    pairs, turned = [fixed_pair(case.feeds[0], case.expected[0], first)], list[Any]()
                else:
                    pairs, turned = case.pairs(session, self.ties)
                seen = session.seen() if self.target.watch else []
                if self.target.watch and not (seen and self.cases.follows):
                    case.untold = self.ties.open_tokens(case.leads)
                other = case.elsewhere(pairs, seen, self.ties) if self.cases.follows else None
                more = attempt < ATTEMPTS - 1
                if more and other is not None and not other.is_like(told.get(number)):
                    follow[number] = told[number] = other
                    again.append(number)
                    continue
                found, settled = self._compared(case, pairs, turned), self.ties.settle(pairs, case.leads, case.own)
                shown = self.ties.shown.compare(pairs + turned, case.leads, case.own[: len(pairs)])
                tied = more and not (self.cases.follows and other is None)
                tied = tied and self._tied(case, settled, turned, pairs, shown)
                if tied:
                    again.append(number)
                    found.wrong = 0
                total.add(found)
                if not tied:
                    progress(case.name)
                    del pairs
                    yield number, case, settled, turned
                del case, settled, turned
            if not again:
                break
            left, drawn = again, self.cases.draw(again, follow)

    def _compared(self, case: Case, pairs: Pairs, turned: Pairs) -> Choices:
        """The choices of a case, and how many of them rounding turns."""
        found = self.ties.compare(pairs + turned, case.leads, case.own[: len(pairs)])
        found.expected, found.untold = expected_ties(case.leads), int(case.open_tokens().sum())
        return found

    def _guessed(self, session: Guessing, case: Case, total: Choices) -> Judged:
        """A case that takes steps once more with guessed tokens."""
        case = replace(case, name=f"{case.name}, guessed")
        pairs, turned = (
            [
                (empty_unread(session.model.table, ours), empty_unread(session.model.table, theirs))
                for ours, theirs in part
            ]
            for part in case.pairs(session, self.ties)
        )
        total.add(self._compared(case, pairs, turned))
        return Judged.of(case, self.ties.settle(pairs, case.leads, case.own), self.by_token, self.summed)

    def _heads(self, session: Session, checks: list[Check]) -> list[OutputReport]:
        """Of the head that guesses tokens ahead, where the package has one and PyTorch is here to ask."""
        cases = getattr(self.cases, "head", None)
        if cases is None or session.model.head is None:
            return []
        case, pairs, check = cases.judged(session)
        checks.append(check)
        bounds = Bounds([case], self.target.coarse, self.dtype)
        judged = Judged.of(case, pairs)
        return [judged.report(output, bounds) for output in pairs[0][0]]

    def _tied(self, case: Case, settled: Pairs, turned: Pairs, pairs: Pairs, found: Choices) -> bool:
        """Whether a tie within a call of the case asks for another prompt; `found` is what differs in `pairs` and in `turned`."""
        within = self.ties.shown.compare(pairs, case.leads, case.own)
        if not within.near_ties or found.wrong > within.wrong:
            return False
        call = self.ties.shown.compare(pairs[:1], case.leads, case.own) if case.steps else within
        if within.wrong > (call.wrong if call.near_ties else 0):
            return False
        bounds = Bounds([case], self.target.coarse, self.dtype)
        judged = Judged.of(case, settled, self.by_token, self.summed)
        return bool(within.wrong) or any(bounds.judge(case, name, judged.held(name)).share > 1 for name in pairs[0][0])

    def _judge(
        self, judged: Sequence[Judged], bounds: Bounds, selections: Choices, checks: list[Check], command: str
    ) -> Report:
        reports = [each.report(output, bounds) for each in judged for output in each.errors[0]]
        checks = [*self._absolute(judged, bounds), *checks]
        failed = {int(r.output.rsplit(".", 1)[1]) for r in reports if not r.passed and "." in r.output}
        own, all_own = (sum(each.case.own_top1[i] for each in judged) for i in range(2))
        return Report(
            reports,
            float(np.concatenate([each.same for each in judged]).mean()),
            own / all_own if all_own else 1.0,
            selections,
            checks,
            min(failed, default=None),
            command,
        )

    def _absolute(self, judged: Sequence[Judged], bounds: Bounds) -> list[Check]:
        """What holds of any right package, before errors are compared with rounding."""
        cases = [each.case for each in judged]
        findings = {each.case.name: each.found for each in judged}
        checks = overflow_checks(
            {case.name: case.overflow for case in cases},
            {case.name: case.right_overflow for case in cases},
            self.dtype,
        )
        rows, tokens = [], []
        for each in judged:
            for number, logits in each.found.logits.items():
                own, held = each.case.own[number][LOGITS][0], each.errors[number][LOGITS][0]
                bound = np.where(np.isnan(held), np.nan, bounds.row_bounds(each.case, number, LOGITS)[0])
                rows.append((own[logits.real], logits.spread[logits.real]))
                tokens.append((each.case.name, number, logits, bound))
        if not checks:
            checks.append(rounding_check(rows, self.dtype))
        return [*checks, finite_check(findings), constant_check(findings), likeliest_check(tokens)]


def _by_token(growth: Mapping[str, Any]) -> bool:
    """Whether a state has one row for each token."""
    return (growth["rows"], growth["per"], growth["lag"]) == (1, 1, 0)


def check_dtype(package: Package) -> None:
    """Raise UnsupportedError where NumPy lacks the package's type."""
    dtype = package.manifest["model"]["dtype"]
    if dtype not in ("float32", "float16"):
        raise UnsupportedError(
            f"the package's weights are {dtype}; polygraphy compares NumPy arrays, which have no bfloat16. "
            "Verify a float32 or float16 export of the same model."
        )
