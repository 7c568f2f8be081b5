"""Compare a subject with PyTorch: the same inputs to both, then row by row."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.files import MODEL
from still_export.package.folder import Package
from still_export.proof.absolute import (
    LOGITS,
    constant_check,
    finite_check,
    layer_of,
    overflow_checks,
    rounding_check,
)
from still_export.proof.answers import EMPTY, Answer, Decisions, Progress, Question, ask, silent
from still_export.proof.calls_file import CallsFile, remove_calls
from still_export.proof.cases import Case, CaseSource
from still_export.proof.codes import scale_name
from still_export.proof.judge import MANTISSA, Bounds, Judged, OutputReport, Report
from still_export.proof.sessions import Guessing, Restoring, Session, Subject, empty_unread
from still_export.proof.spill import free_memory
from still_export.proof.verdict import Check
from still_export.runtime.feeding import Feeding
from still_graphs.states import StateTable
from still_kernels.registry import ties_of
from still_kernels.ties import Choices, expected_ties


@dataclass
class Answers:
    """All answers of a subject.

    Args:
        cases: By number of a case.
        otherwise: By what differs in the steps: "guessed" tokens, or states "restored" in other rows.
        checks: What must be true of the runtime by itself.
        heads: Verdicts on the head that guesses tokens ahead.
        selections: Counts of what it chose, filled while cases are compared.
    """

    cases: dict[int, Answer] = field(default_factory=dict)
    otherwise: dict[str, dict[int, Answer]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    heads: list[OutputReport] = field(default_factory=list)
    selections: Choices = field(default_factory=Choices)

    @property
    def decisions(self) -> dict[int, Decisions]:
        """The choices that the reference makes, too."""
        return {number: answer.decisions for number, answer in self.cases.items()}


class Verifier:
    """Compares a package, run by its runtime or widened, with the PyTorch model it was exported from.

    Args:
        cases: Calls with PyTorch's answers in the subject's type.
        replays: Tokens of the runtime's own checks.
    """

    def __init__(self, package: Package, cases: CaseSource, subject: Subject, replays: int = 0) -> None:
        self.package, self.cases, self.subject, self.replays = package, cases, subject, replays
        self.answered: tuple[list[Question], Answers] | None = None  # a second run asks nothing
        self.ties = ties_of(package.manifest)
        table = StateTable.of(package.manifest)
        self.by_token = {s.present: s.growth["axis"] for s in table if s.growth and _is_by_token(s.growth)}
        self.scales = {s.present: scale_name(s.present) for s in table if s.dtype == "int32"}
        self.halves = {s.present: s.dtype for s in table if s.dtype in MANTISSA}
        self.dtype = package.manifest["model"]["dtype"]
        subject.watch = tuple(op.watched for op in self.ties.each if op.watched)

    def run(self, folder: Path | None = None, progress: Progress = silent, save_calls: bool = False) -> Report:
        """Run the subject, then PyTorch with the subject's choices, and compare.

        Args:
            folder: Gets calls for polygraphy's own command after a mismatch, or if `save_calls`; None: never.
            progress: Called with the number of the subject's answers, of PyTorch's layers, and of compared cases.
        """
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if self.answered is None:
            questions = [self.cases.begin(number) for number in range(self.cases.count)]
            with self.subject.open() as session:  # a missing runtime fails before PyTorch starts
                self.answered = questions, self.ask(session, questions, progress)
            runner = weakref.ref(session.model)
            del session  # its memory matters more than opening it again
            if runner() is not None:  # free runtime objects that refer to each other
                gc.collect()
        questions, recorded = self.answered
        answers = Answers(recorded.cases, recorded.otherwise, [*recorded.checks], recorded.heads)
        free_memory()
        self.cases.progress = progress
        drawn = self.cases.draw(range(self.cases.count), answers.decisions if self.cases.uses_decisions else EMPTY)
        calls = CallsFile(self.subject) if folder is not None else None
        judged, bounds = self._compare_all(drawn, answers, progress, calls)
        report = self.judge(judged, bounds, answers, "")
        if folder is None or calls is None:
            return report
        remove_calls(folder)
        return replace(report, command=calls.write(folder)) if save_calls or not report.passed else report

    def _compare_all(
        self, drawn: list[Case], answers: Answers, progress: Progress, calls: CallsFile | None
    ) -> tuple[list[Judged], Bounds]:
        """Compare and drop every case, in order; `calls` keeps their inputs and outputs."""
        drawn.reverse()
        judged: list[Judged] = []
        for number in range(self.cases.count):
            case = drawn.pop()
            judged += self.compare(number, case, answers)
            if calls is not None:
                calls.add(case)
            case.forget()
            progress("comparing", number + 1, self.cases.count)
            free_memory()
        answers.checks += self.subject.checks(self.replays)
        judged.sort(key=lambda each: each.otherwise)
        return judged, Bounds([each.case for each in judged])

    def ask(self, session: Session, questions: Sequence[Question], progress: Progress = silent) -> Answers:
        """All answers of the subject, before the reference runs."""
        found = Answers()
        for number, question in enumerate(questions):
            progress(f"asking {self.subject.title}", number, len(questions))
            found.cases[number] = ask(session, question, self.ties.shown)
            if question.steps and self.replays:
                found.checks += session.checks(question.feeds[0], min(self.replays, len(question.steps)))
        if session.model.guesses and self.subject.graph == MODEL:  # the portable graph does not say what to fold
            guessing = Guessing(session.model)
            found.otherwise["guessed"] = {
                n: ask(guessing, x, self.ties.shown) for n, x in enumerate(questions) if x.steps
            }
        if not Feeding.of(self.package.manifest).whole_prompts:
            most = max((len(x.steps[0]) for x in questions if x.steps), default=0)
            for widest in [n for n, x in enumerate(questions) if x.steps and len(x.steps[0]) == most][:1]:
                answer = ask(Restoring(session.model), questions[widest], self.ties.shown)
                found.otherwise["restored"] = {widest: answer}
        found.heads = self._heads(session, found.checks)
        return found

    def compare(self, number: int, case: Case, answers: Answers) -> list[Judged]:
        """Judge the subject's answers to a case, and its answers with other steps."""
        found = [self._compared(case, answers.cases[number], answers.selections, self._same_choices)]
        table = StateTable.of(self.package.manifest)
        for how, by_number in answers.otherwise.items():
            if number in by_number:
                other = replace(case, name=f"{case.name}, {how}")
                found.append(self._compared(other, by_number[number], answers.selections, False, table))
                other.forget()
        return found

    @property
    def _same_choices(self) -> bool:
        """Whether PyTorch made this subject's choices."""
        return self.cases.uses_decisions or bool(getattr(self.cases, "has_decisions", False))

    def _compared(
        self, case: Case, answer: Answer, total: Choices, same_choices: bool, otherwise: StateTable | None = None
    ) -> Judged:
        """One case, judged as far as possible before all are known; `total` counts its choices."""
        pairs = case.pairs(answer.outputs)
        if otherwise is not None:
            pairs = [(empty_unread(otherwise, expected), empty_unread(otherwise, actual)) for expected, actual in pairs]
        if self.subject.watch and not (answer.decisions.seen and self.cases.uses_decisions):
            case.unreported = self.ties.open_tokens(case.leads)
        found = self.ties.compare(pairs, case.leads, case.own[: len(pairs)])
        found.expected, found.unreported = expected_ties(case.leads), int(case.open_tokens().sum())
        total.add(found)
        turned = [] if same_choices else self.ties.turned(pairs, case.leads, case.own[: len(pairs)])
        judged = Judged.of(case, pairs, self.by_token, self.scales, self.halves, turned)
        judged.otherwise = otherwise is not None
        return judged

    def _heads(self, session: Session, checks: list[Check]) -> list[OutputReport]:
        """Verdicts on the MTP head, if the package has one and PyTorch is available."""
        cases = getattr(self.cases, "head", None)
        if cases is None or session.model.head is None:
            return []
        case, pairs, check = cases.judged(session)
        checks.append(check)
        bounds = Bounds([case])
        judged = Judged.of(case, pairs)
        return [judged.report(output, bounds) for output in pairs[0][0]]

    def judge(self, judged: Sequence[Judged], bounds: Bounds, answers: Answers, command: str) -> Report:
        """The verdict."""
        selections, checks = answers.selections, answers.checks
        reports = [each.report(output, bounds) for each in judged for output in each.errors[0]] + answers.heads
        failed = {int(layer_of(r.output)) for r in reports if not r.passed and layer_of(r.output) < math.inf}
        own, all_own = (sum(each.case.own_top1[i] for each in judged) for i in range(2))
        same = np.concatenate([each.same for each in judged] or [np.ones(0)])
        return Report(
            reports,
            float(same.mean()) if same.size else 1.0,
            own / all_own if all_own else 1.0,
            selections,
            [*self._absolute(judged), *checks],
            min(failed, default=None),
            command,
            _not_compared(selections, sum(each.open_rows for each in judged)),
        )

    def _absolute(self, judged: Sequence[Judged]) -> list[Check]:
        """Checks that any correct package passes."""
        cases = [each.case for each in judged]
        findings = {each.case.name: each.found for each in judged}
        checks = overflow_checks(
            {case.name: case.overflow for case in cases},
            {case.name: case.right_overflow for case in cases},
            self.dtype,
        )
        if not checks:
            rows = []
            for each in judged:
                for number, logits in each.found.logits.items():
                    own = each.case.own[number][LOGITS][0]
                    rows.append((own[logits.real], logits.spread[logits.real]))
            checks.append(rounding_check(rows, self.dtype))
        return [*checks, finite_check(findings), constant_check(findings)]


def _not_compared(selections: Choices, rows: int) -> list[str]:
    """What choices leave open, one line each."""
    found = []
    if selections.unreported:
        found.append(
            f"{selections.unreported} tokens with a near tie between experts or blocks, which this runtime does not report: "
            "their logits, and states of later layers, are not compared"
        )
    if rows:
        found.append(
            f"{rows} rows behind near ties in which PyTorch did not choose as the runtime. To compare them: still-export verify PACKAGE "
            "--selections FILE, then --record CALLS --follow FILE where PyTorch is"
        )
    return found


def _is_by_token(growth: Mapping[str, Any]) -> bool:
    """Whether a state has one row for each token."""
    return (growth["rows"], growth["per"], growth["lag"]) == (1, 1, 0)
