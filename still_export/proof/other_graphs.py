"""Prove what other machines run of a package: function bodies, where native kernels do not load, and the portable graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from still_export.package.files import MODEL, PORTABLE
from still_export.package.folder import Package
from still_export.package.refusals import RunError
from still_export.proof.answers import EMPTY, Answer, DecisionsByCase, Progress, Question, silent
from still_export.proof.cases import Case, CaseSource
from still_export.proof.sessions import Subject
from still_export.proof.verdict import Check, Verdict
from still_export.proof.verify import Verifier

STEPS = 4
"""Single tokens after the prompts."""
NEAR = 1e-3
"""Two runtimes selected the same token if its numbers differ by at most this, relative to the layer's largest."""
SHOWN = 4
"""Further outputs that a verdict lists."""


def other_lengths(chunk: int) -> tuple[int, ...]:
    """Lengths of the prompts: one token, and the first token of a third chunk."""
    return (1, 2 * chunk + 1)


def check_other_graphs(
    package: Package,
    compared: Subject,
    cases: Callable[[bool], CaseSource],
    progress: Progress = silent,
    most: int | None = None,
) -> Verdict:
    """Compare with PyTorch what a package runs without its native kernels, on ONNX Runtime's other provider if it has GPU kernels, and its
    portable graph.

    Args:
        cases: Creates the cases; its argument: whether ONNX Runtime's CUDA provider multiplies blocks of codes (`by_cuda` of the proof).
        progress: Called with the phases of each graph.
        most: Number of first cases to compare; None: all.
    """
    verdict = Verdict()
    providers = [compared.provider]
    if (package.manifest.get("native") or {}).get("archs"):
        if compared.provider == "cpu" and (missing := cuda_missing()):
            verdict.not_asked.append(f"the package's kernels for GPUs: {missing}")
        else:
            providers = ["cpu", "cuda"]
    subjects: dict[str, Subject] = {}
    for provider in providers:
        on = " on CUDA" if provider == "cuda" else ""
        if provider != compared.provider:
            subjects[MODEL + (on or " on the CPU")] = Subject(package, "ort", provider)
        if provider != compared.provider or compared.native:
            subjects[f"{MODEL} without the native kernels{on}"] = Subject(package, "ort", provider, bodies=True)
    if PORTABLE in package.manifest["files"]:
        subjects[PORTABLE] = Subject(package, "ort", bodies=True, graph=PORTABLE)
    drawn: dict[bool, DrawnOnce] = {}
    for what, subject in subjects.items():
        by_cuda = subject.provider == "cuda" and subject.bodies and package.manifest.get("quantization") is not None
        if by_cuda not in drawn:
            drawn[by_cuda] = DrawnOnce(cases(by_cuda), most)
        verdict.checks.append(_compare(what, package, subject, drawn[by_cuda], progress))
    return verdict


def cuda_missing() -> str:
    """Why ONNX Runtime's CUDA provider is not available; empty: it is."""
    import onnxruntime

    from still_export.runtime.cuda_driver import CudaError, Driver
    from still_export.runtime.ort_session import CUDA

    if CUDA not in onnxruntime.get_available_providers():
        return f"this onnxruntime has no {CUDA}"
    try:
        return "" if Driver.device_count() else "this machine has no GPU"
    except CudaError as error:
        return str(error).rstrip(".")


class DrawnOnce:
    """PyTorch's answers, computed once for several subjects with the same questions. They use the choices of the first subject.

    Args:
        most: Number of first cases to use; None: all.

    Attributes:
        again: The last answers were those for an earlier subject.
    """

    def __init__(self, source: CaseSource, most: int | None = None) -> None:
        self.source, self.uses_decisions = source, source.uses_decisions
        self.count = min(most or source.count, source.count)
        self.head = getattr(source, "head", None)
        self.again = False
        self._questions: dict[int, Question] = {}
        self._drawn: list[Case] = []
        self._decisions: DecisionsByCase = {}

    @property
    def progress(self) -> Progress:
        return self.source.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.source.progress = progress

    def begin(self, number: int) -> Question:
        if number not in self._questions:
            self._questions[number] = self.source.begin(number)
        return self._questions[number]

    def by_layer(self, answers: Mapping[int, Answer]) -> dict[int, Case]:
        return self.source.by_layer(answers)

    def draw(self, numbers: Sequence[int], decisions: DecisionsByCase = EMPTY) -> list[Case]:
        """Like CaseSource; reuses the first subject's answers if the subject may have made the same choices."""
        self.again = bool(self._drawn) and all(
            each.is_like(self._decisions[number], NEAR) for number, each in decisions.items()
        )
        if not self.again:
            self._drawn, self._decisions = self.source.draw(numbers, decisions), decisions
        return [replace(case) for case in self._drawn]

    def forget(self) -> None:
        self._drawn = []


def _compare(what: str, package: Package, subject: Subject, cases: DrawnOnce, progress: Progress) -> Check:
    name = f"{what} computes what PyTorch computes"

    def say(phase: str, done: int, total: int) -> None:
        progress(f"{what}: {phase}", done, total)

    with tempfile.TemporaryDirectory() as folder:
        verifier = Verifier(package, cases, subject, STEPS)
        try:
            report = verifier.run(Path(folder), say)
            if cases.again and (not report.passed or report.selections.near_ties):  # its choice may be another token
                cases.forget()
                report = verifier.run(Path(folder), say)
        except RunError as error:
            return Check(name, False, str(error), subject.graph)
    wrong = [each.describe() for each in report.mismatches]
    if report.selections.wrong:
        wrong.append(f"{report.selections.wrong} selections differ without a near tie")
    wrong += [str(check) for check in report.checks if not check.passed]
    return Check(
        name, report.passed, wrong[0] if wrong else "", subject.graph * bool(wrong), notes=tuple(wrong[1 : 1 + SHOWN])
    )
