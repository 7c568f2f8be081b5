"""The proof of a package: PyTorch and the subject on the same inputs, compared row by row."""

from __future__ import annotations

import gc
import math
import shlex
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import UnsupportedError
from still_export.graph.quantization.policy import rounds_activations
from still_export.package.folder import Package
from still_export.package.staging import staged_files
from still_export.proof.absolute import (
    LOGITS,
    constant_check,
    finite_check,
    layer_of,
    likeliest_check,
    overflow_checks,
    rounding_check,
)
from still_export.proof.answers import EMPTY, Answer, Decisions, Progress, Question, ask, chosen_for_layers, silent
from still_export.proof.calls_file import CallsFile
from still_export.proof.cases import Case, CaseSource
from still_export.proof.chains import HIDDEN
from still_export.proof.codes import has_narrow_caches
from still_export.proof.constants import ALIKE, LAYER_UNIT, NORMED, RESIDUAL_SUMS, SHARP_ROW, SOME, UNIT
from still_export.proof.judge import Bounds
from still_export.proof.judged import Judged, OutputReport, Report
from still_export.proof.layer_inputs import layer_inputs
from still_export.proof.sessions import Guessing, Session, Subject, empty_unread
from still_export.proof.spill import free_memory
from still_export.proof.verdict import Check
from still_graphs.ops import OPS
from still_graphs.states import StateTable
from still_kernels.registry import ties_of
from still_kernels.ties import Choices, expected_ties

DECODE_STEPS = 256
"""More than a chunk, so that chunks are promoted between plain steps."""

WORK = 8.0
"""Operations per parameter and token: two in each of two runs; the one in a wider type counts more."""

BY_LAYER = "layers on the runtime's own input: a figure of half precision on ONNX Runtime, where the graph shows what layers read"

NO_PROMPT = (
    f"layers on the runtime's own input: no prompt has {SOME[0]} to {SOME[1]} tokens and no images (--lengths adds one)"
)


@dataclass
class Answers:
    """All answers of a subject.

    Args:
        cases, guessed: By number of a case; `guessed`: the same with guessed tokens in the steps.
        checks: What must be true of the runtime by itself.
        heads: Verdicts on the head that guesses tokens ahead.
        selections: Counts of what it chose, filled while cases are compared.
    """

    cases: dict[int, Answer] = field(default_factory=dict)
    guessed: dict[int, Answer] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    heads: list[OutputReport] = field(default_factory=list)
    selections: Choices = field(default_factory=Choices)

    @property
    def decisions(self) -> dict[int, Decisions]:
        """The choices that the reference makes, too."""
        return {number: answer.decisions for number, answer in self.cases.items()}


class Verifier:
    """Compares a package, run by its runtime, with the PyTorch model it was exported from.

    Args:
        replays: Tokens of the runtime's own checks.
    """

    def __init__(self, package: Package, cases: CaseSource, subject: Subject, replays: int = DECODE_STEPS) -> None:
        check_dtype(package)
        self.package, self.cases, self.subject, self.replays = package, cases, subject, replays
        self.answered: tuple[list[Question], Answers] | None = None  # a second run asks nothing
        self.ties = ties_of(package.manifest)
        table = StateTable.of(package.manifest)
        self.by_token = {s.present: s.growth["axis"] for s in table if s.growth and _by_token(s.growth)}
        subject.watch = tuple(op.watched for op in self.ties.each if op.watched)
        rounded = has_narrow_caches(package.manifest) or rounds_activations(package.manifest)
        self.dtype = "float16" if rounded else package.manifest["model"]["dtype"]
        self.sharp, self.open_layers = self.dtype == "float16" and not rounded, BY_LAYER
        sums = {(op.name, state.name) for op in OPS.values() for state in op.states if state.features}
        summed = [s.present for s in table if (s.op, s.name.rpartition(".")[0]) in sums]
        coarse = subject.coarse > 1 and package.manifest["model"]["dtype"] == "float16"
        self.summed = dict.fromkeys(summed if coarse else (), UNIT)
        self.fixed = {s.present for s in table if not s.growth}
        wide = [s.present for s in table if not s.growth and s.dtype == "float32"]
        of_features = [s.present for s in table if s.present in wide and s.op in {op for op, _ in sums}]
        self.averaged = dict.fromkeys(of_features if coarse else (), UNIT)
        self.summed_by_layer = dict.fromkeys(wide, LAYER_UNIT) | self.averaged | self.summed
        behind_norms = [LOGITS, *(s.present for s in table if s.dtype == "float16")]
        self.written = dict.fromkeys(behind_norms, NORMED * LAYER_UNIT)

    def run(self, folder: Path, progress: Progress = silent) -> Report:
        """Run the subject, then PyTorch with the subject's choices, and compare. Saves the calls to `folder` (inputs.json, outputs.json)
        for polygraphy's own command.

        Args:
            folder: Created if missing; polygraphy.sh there is the command.
            progress: Called with the number of the subject's answers, of PyTorch's layers, and of compared cases.
        """
        import polygraphy.comparator  # noqa: F401  # writes the calls at the end; if it is missing, this fails first

        folder.mkdir(parents=True, exist_ok=True)
        if self.answered is None:
            questions = [self.cases.begin(number) for number in range(self.cases.count)]
            progress(self._cost(questions), 0, 1)
            with self.subject.open() as session:  # a missing runtime fails before PyTorch starts
                self.answered = questions, self.ask(session, questions, progress)
            runner = weakref.ref(session.model)
            del session  # its memory matters more than opening it again
            if runner() is not None:  # free runtime objects that refer to each other
                gc.collect()
        questions, recorded = self.answered
        answers = Answers(recorded.cases, recorded.guessed, [*recorded.checks], recorded.heads)
        free_memory()
        self.cases.progress = progress
        drawn = self.cases.draw(range(self.cases.count), answers.decisions if self.cases.uses_decisions else EMPTY)
        drawn.reverse()
        judged: list[Judged] = []
        sharp = self._by_layer(questions, progress)
        with staged_files(folder) as work, CallsFile(work, self.subject) as calls:
            for number in range(self.cases.count):
                case = drawn.pop()
                judged += self.compare(number, case, answers)
                calls.add(case)
                case.forget()
                progress("comparing", number + 1, self.cases.count)
                free_memory()
            answers.checks += self.subject.checks(self.replays)
            judged.sort(key=lambda each: each.guessed)
            bounds = Bounds([each.case for each in judged], self.subject.coarse, self.dtype)
            command = self.subject.command()
            command += ["--load-inputs", str(folder / "inputs.json"), "--load-outputs", str(folder / "outputs.json")]
            line = shlex.join(command + bounds.arguments(half=self.package.manifest["model"]["dtype"] != "float32"))
            (work / "polygraphy.sh").write_text(line + "\n", encoding="utf-8")
        return self.judge(judged, bounds, answers, line, sharp)

    def _by_layer(self, questions: Sequence[Question], progress: Progress) -> list[Judged]:
        """In half precision, if the graph allows further outputs: run calls again and let PyTorch's layers read the runtime's inputs."""
        if not self.sharp or not self.cases.uses_decisions or not self.subject.record.graphs:
            return []
        names = layer_inputs(self.package.path / self.subject.graph, self.package.manifest["model"]["layers"])
        chosen = chosen_for_layers(questions)
        self.open_layers = BY_LAYER if not names or chosen else NO_PROMPT
        if not names or not chosen:
            return []
        with self.subject.open(names) as session:
            return self.by_layer(session, chosen, progress)

    def by_layer(
        self, session: Session, questions: Mapping[int, Question], progress: Progress = silent
    ) -> list[Judged]:
        """Compare `questions` by layer; outputs of `session` contain the layers' inputs."""
        answers = {}
        for done, (number, question) in enumerate(questions.items()):
            progress("asking for layers", done, len(questions))
            answers[number] = ask(session, question, self.ties.shown)
        self.cases.progress = lambda phase, done, total: progress(f"{phase}, each on the runtime's input", done, total)
        judged = []
        for number, case in self.cases.by_layer(answers).items():
            if _carries_more(case, answers[number]):
                self.open_layers = BY_LAYER
                return []
            case.name += ", by layer"
            judged.append(self._compared(case, answers[number], Choices(), True, summed=self.summed_by_layer))
            case.forget()
        return judged

    def _cost(self, questions: Sequence[Question]) -> str:
        """The amount of work and the estimated time of PyTorch on this CPU."""
        tokens = sum(int(feed["new_tokens"].sum()) for each in questions for feed in each.feeds)
        tokens += sum(step.size for each in questions for step in each.steps)
        cost = f"{len(questions)} cases, {tokens:,} tokens"
        parameters = self.package.manifest["model"].get("parameters", 0)
        if not self.cases.uses_decisions or not parameters:
            return cost
        return f"{cost}, about {WORK * parameters * tokens / _rate() / 60:.1f} minutes of PyTorch on this CPU"

    def ask(self, session: Session, questions: Sequence[Question], progress: Progress = silent) -> Answers:
        """All answers of the subject, before the reference runs."""
        found = Answers()
        for number, question in enumerate(questions):
            progress(f"asking {self.subject.title}", number, len(questions))
            found.cases[number] = ask(session, question, self.ties.shown)
            if question.steps and self.replays:
                found.checks += session.checks(question.feeds[0], min(self.replays, len(question.steps)))
        if session.model.guesses:
            guessing = Guessing(session.model)
            found.guessed = {n: ask(guessing, each, self.ties.shown) for n, each in enumerate(questions) if each.steps}
        found.heads = self._heads(session, found.checks)
        return found

    def compare(self, number: int, case: Case, answers: Answers) -> list[Judged]:
        """Judge the subject's answers to a case, and its answers with guessed tokens in the steps."""
        found = [self._compared(case, answers.cases[number], answers.selections, self._same_choices)]
        if number in answers.guessed:
            table, guessed = StateTable.of(self.package.manifest), answers.guessed[number]
            case = replace(case, name=f"{case.name}, guessed")
            found.append(self._compared(case, guessed, answers.selections, False, table))
            case.forget()
        return found

    @property
    def _same_choices(self) -> bool:
        """Whether PyTorch made this subject's choices."""
        return self.cases.uses_decisions or bool(getattr(self.cases, "has_decisions", False))

    def _compared(
        self,
        case: Case,
        answer: Answer,
        total: Choices,
        same_choices: bool,
        guessed: StateTable | None = None,
        summed: Mapping[str, float] | None = None,
    ) -> Judged:
        """One case, judged as far as possible before all are known; `total` counts its choices."""
        pairs = case.pairs(answer.outputs)
        if guessed is not None:
            pairs = [(empty_unread(guessed, expected), empty_unread(guessed, actual)) for expected, actual in pairs]
        if self.subject.watch and not (answer.decisions.seen and self.cases.uses_decisions):
            case.unreported = self.ties.open_tokens(case.leads)
        found = self.ties.compare(pairs, case.leads, case.own[: len(pairs)])
        found.expected, found.unreported = expected_ties(case.leads), int(case.open_tokens().sum())
        total.add(found)
        turned = [] if same_choices else self.ties.turned(pairs, case.leads, case.own[: len(pairs)])
        if summed is None:
            judged = Judged.of(case, pairs, self.by_token, self.summed, turned)
        else:
            times = SHARP_ROW * self.subject.coarse
            read = [name for name in pairs[0][0] if name.startswith(f"present_{HIDDEN}.")]
            written = self.written | dict.fromkeys(read, RESIDUAL_SUMS * LAYER_UNIT)
            judged = Judged.of(case, pairs, self.by_token, summed, turned, times, written, self.averaged)
        judged.guessed = guessed is not None
        return judged

    def _heads(self, session: Session, checks: list[Check]) -> list[OutputReport]:
        """Verdicts on the MTP head, if the package has one and PyTorch is available."""
        cases = getattr(self.cases, "head", None)
        if cases is None or session.model.head is None:
            return []
        case, pairs, check = cases.judged(session)
        checks.append(check)
        bounds = Bounds([case], self.subject.coarse, self.dtype)
        judged = Judged.of(case, pairs)
        return [judged.report(output, bounds) for output in pairs[0][0]]

    def judge(
        self, judged: Sequence[Judged], bounds: Bounds, answers: Answers, command: str, sharp: Sequence[Judged] = ()
    ) -> Report:
        """The verdict; `sharp` are cases by layer."""
        selections, checks = answers.selections, answers.checks
        reports = [each.report(output, bounds) for each in judged for output in each.errors[0]] + answers.heads
        layers, unknown = self._judged_by_layer(sharp, all(each.passed for each in reports))
        reports += layers
        checks = [*self._absolute(judged, bounds), *checks]
        failed = {int(layer_of(r.output)) for r in reports if not r.passed and layer_of(r.output) < math.inf}
        own, all_own = (sum(each.case.own_top1[i] for each in judged) for i in range(2))
        return Report(
            reports,
            float(np.concatenate([each.same for each in judged] or [np.ones(1)]).mean()),
            own / all_own if all_own else 1.0,
            selections,
            checks,
            min(failed, default=None),
            command,
            [*_not_compared(selections, sum(each.open_rows for each in judged)), *unknown],
        )

    def _judged_by_layer(self, sharp: Sequence[Judged], whole: bool) -> tuple[list[OutputReport], list[str]]:
        """Verdicts on cases by layer, or why there are none: if the `whole` run passed and a layer is far off, its inputs were
        misidentified."""
        if not sharp:
            return [], [self.open_layers] if self.sharp else []
        bounds = Bounds([each.case for each in sharp], self.subject.coarse, self.dtype, sharp=True, fixed=self.fixed)
        reports = [each.report(output, bounds) for each in sharp for output in each.errors[0]]
        far = [o for each in sharp for o in each.errors[0] if HIDDEN in o and each.distance(o) > 2 * (1 - ALIKE)]
        return ([], [BY_LAYER]) if far and whole else (reports, [])

    def _absolute(self, judged: Sequence[Judged], bounds: Bounds) -> list[Check]:
        """Checks that any correct package passes."""
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
                own, errors = each.case.own[number][LOGITS][0], each.errors[number][LOGITS][0]
                bound = np.where(np.isnan(errors), np.nan, bounds.row_bounds(each.case, number, LOGITS)[0])
                rows.append((own[logits.real], logits.spread[logits.real]))
                tokens.append((each.case.name, number, logits, bound))
        if not checks:
            checks.append(rounding_check(rows, self.dtype))
        return [*checks, finite_check(findings), constant_check(findings), likeliest_check(tokens)]


@cache
def _rate() -> float:
    """Multiply-adds a second of this CPU."""
    square = np.ones((1024, 1024), np.float32)
    begin = time.perf_counter()
    square @ square
    return 2 * 1024**3 / (time.perf_counter() - begin)


def _carries_more(case: Case, answer: Answer) -> bool:
    """Whether PyTorch's layers read more than the hidden states in the graph: RWKV-7's also read the first layer's values."""
    return any(
        right.shape != actual[name].shape
        for expected, actual in case.pairs(answer.outputs)
        for name, right in expected.items()
        if name.startswith(f"present_{HIDDEN}.")
    )


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


def _by_token(growth: Mapping[str, Any]) -> bool:
    """Whether a state has one row for each token."""
    return (growth["rows"], growth["per"], growth["lag"]) == (1, 1, 0)


def check_dtype(package: Package) -> None:
    """Raise UnsupportedError where NumPy lacks the package's type."""
    dtype = package.manifest["model"]["dtype"]
    if dtype not in ("float32", "float16"):
        raise UnsupportedError(
            f"the package's weights are {dtype}; polygraphy compares NumPy arrays, which have no bfloat16. "
            "Verify an export of the same model with --dtype float32 or float16."
        )
