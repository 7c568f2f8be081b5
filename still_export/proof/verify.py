"""The proof of a package: PyTorch and the target on the same inputs, compared by polygraphy on every output."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import UnsupportedError
from still_export.mixers.excuses import excuses_of
from still_export.mixers.ties import Choices, Pairs
from still_export.package.calls import Arrays
from still_export.package.folder import Package
from still_export.package.staging import staged_files
from still_export.proof.cases import Case, CaseSource, Noise, distance, part_medians, same_best
from still_export.proof.checks import Check
from still_export.proof.codes import in_codes
from still_export.proof.sessions import Session, Target
from still_export.proof.tolerance import FLOAT32, Tolerance, half_tolerance

DECODE_STEPS = 256
"""More than a chunk, so that a promotion happens between plain steps."""

ATTEMPTS = 5
"""Prompts tried where a near tie made the runtimes select different tokens; see `Verifier._settled`."""


Judged = tuple[Case, Pairs, Pairs]
"""A case, its outputs, and those of the steps in which the target chose otherwise."""


@dataclass
class OutputReport:
    """Errors of one output over all calls of a case.

    `own_mean_abs` is that of PyTorch's half precision run, 0 in float32. `worst` is the largest of what is held to the bound, in the
    call `worst_call`, counted from 1: the error of a number, in half precision the median of a part (a row's logits, a head of a row
    of a state).
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
    passed: bool


@dataclass
class Report:
    """The verdict on a package; `first_diverging_layer` is the lowest one with a failed state."""

    outputs: list[OutputReport]
    top1: float
    own_top1: float
    selections: Choices
    checks: list[Check]
    first_diverging_layer: int | None
    command: str
    tie: float
    passed: bool = field(init=False)

    def __post_init__(self) -> None:
        good = all(r.passed for r in self.outputs) and all(c.passed for c in self.checks)
        self.passed = good and not self.selections.wrong

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "passed": self.passed,
            "top1_agreement": self.top1,
            "pytorch_half_top1_agreement": self.own_top1,
            "selections": {**vars(self.selections), "tie": self.tie},
            "checks": [vars(c) for c in self.checks],
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
        self.excuses = excuses_of(package.manifest)

    def run(self, folder: Path, progress: Callable[[str], None] = lambda done: None) -> Report:
        """Compare every case, save the calls to `folder` (inputs.json, outputs.json) for polygraphy's own command, and judge.

        Args:
            folder: Made where missing; polygraphy.sh there is the command.
            progress: Told each finished case.
        """
        from polygraphy.logger import G_LOGGER

        selections = Choices()
        checks: list[Check] = []
        G_LOGGER.module_severity = G_LOGGER.ERROR
        with self.target.open() as session:
            judged = self._settled(session, selections, progress)
            for case, *_ in judged:
                if case.steps and self.replays:
                    checks += session.checks(case.feeds[0], min(self.replays, len(case.steps)))
        checks += self.target.checks(self.replays)
        cases = [case for case, *_ in judged]
        tolerance = half_tolerance(cases, self.excuses) if any(case.noise for case in cases) else FLOAT32
        if tolerance.statistic != "elemwise":
            for i, (case, pairs, turned) in enumerate(judged):
                given = (lambda case=case: case.leads, tolerance.ties)  # type: ignore[misc]
                selections.add(self.excuses.compare(pairs + turned, *given))
                judged[i] = case, self.excuses.settle(pairs, *given), turned
        command = self.target.command()
        command += ["--load-inputs", str(folder / "inputs.json"), "--load-outputs", str(folder / "outputs.json")]
        line = shlex.join(command + tolerance.arguments())
        folder.mkdir(parents=True, exist_ok=True)
        with staged_files(folder) as work:
            self._save(cases, work)
            (work / "polygraphy.sh").write_text(line + "\n", encoding="utf-8")
        return self._judge(judged, tolerance, selections, checks, line)

    def _save(self, cases: list[Case], folder: Path) -> None:
        """Write the calls as polygraphy reads them."""
        from polygraphy.comparator import IterationResult, RunResults
        from polygraphy.json import save_json
        from polygraphy.logger import G_LOGGER

        answers = [out for case in cases for out in case.expected]
        # Words of codes are left out: what polygraphy would make of their differences says nothing.
        answers = [{name: x for name, x in out.items() if name not in in_codes(out)} for out in answers]
        feeds, expected = self.target.saved([feed for case in cases for feed in case.feeds], answers)
        save_json(feeds, str(folder / "inputs.json"))
        results = [IterationResult(out, runner_name="pytorch") for out in expected]
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(invalid="ignore"):
            RunResults([("pytorch", results)]).save(str(folder / "outputs.json"))

    def _settled(self, session: Session, total: Choices, progress: Callable[[str], None]) -> list[Judged]:
        """Cases on which both runtimes select the same tokens, as far as single numbers are compared, and their outputs.

        Where two scores differ by less than rounding, either selection is right and everything after it differs. Steps go on from
        PyTorch's state there (`Case.pairs`); where it happened within a call, the prompt's of steps among them, another prompt is drawn, in
        half precision only where what differs exceeds the bounds of the case itself, or other selections differ by more than a tie: those
        of later layers and chunks read what the tie turned (PyTorch's own float16 run does so, too). A selection that differs by more than
        a tie where nothing ties, or in a step, is kept: it is a mismatch, as is what is left in the last prompt.
        """
        judged: dict[int, Judged] = {}
        left = list(range(self.cases.count))
        for _ in range(ATTEMPTS):
            if not left:
                break
            again = []
            for number, case in zip(left, self.cases.draw(left), strict=True):
                judged[number] = (case, *case.pairs(session, self.excuses))
                if self._tied(*judged[number], total):
                    again.append(number)
                else:
                    progress(case.name)
            left = again
        for number in left:
            progress(judged[number][0].name)
        return [judged[number] for number in range(self.cases.count)]

    def _tied(self, case: Case, pairs: Pairs, turned: Pairs, total: Choices) -> bool:
        """Whether a tie within a call of the case asks for another prompt."""
        own = half_tolerance([case], self.excuses) if case.noise else FLOAT32
        given = (lambda: case.leads, own.ties)
        found, first = (self.excuses.compare(each, *given) for each in (pairs, turned))
        if not case.noise:
            total.add(found)
            total.add(first)
        call = self.excuses.compare(pairs[:1], *given) if case.steps else found
        behind_ties = call.wrong if case.noise and call.near_ties else 0
        if not found.near_ties or first.wrong or found.wrong > behind_ties:
            return False
        return not (case.noise and not found.wrong and _within(self.excuses.settle(pairs, *given), own))

    def _judge(
        self,
        judged: list[Judged],
        tolerance: Tolerance,
        selections: Choices,
        checks: list[Check],
        command: str,
    ) -> Report:
        reports: list[OutputReport] = []
        agree: list[np.ndarray] = []
        for case, pairs, _ in judged:
            verdicts = self._verdicts(pairs, tolerance)
            agree += [same_best(*pair) for pair in pairs]
            for output in pairs[0][0]:
                bound = tolerance.absolute.get(output, tolerance.absolute[""])
                by_part = tolerance.statistic != "elemwise"
                found = report_of(case, output, pairs, bound, by_part)
                within = not by_part or found.worst <= bound
                found.passed = found.passed and verdicts.get(output, True) and within
                reports.append(found)
        failed = {int(r.output.rsplit(".", 1)[1]) for r in reports if not r.passed and "." in r.output}
        own, all_own = (sum(case.own_top1[i] for case, *_ in judged) for i in range(2))
        return Report(
            reports,
            float(np.concatenate(agree).mean()),
            own / all_own if all_own else 1.0,
            selections,
            checks,
            min(failed, default=None),
            command,
            max(tolerance.ties.values()),
        )

    def _verdicts(self, pairs: list[tuple[Arrays, Arrays]], tolerance: Tolerance) -> dict[str, bool]:
        """Polygraphy's verdict on each output over all calls; outputs without elements are left out."""
        from polygraphy.comparator import Comparator, IterationResult, RunResults

        compare = _simple_compare()(
            check_error_stat=tolerance.statistic,
            atol=tolerance.absolute,
            rtol=tolerance.relative,
            infinities_compare_equal=True,
        )

        def results(name: str, side: int) -> tuple[str, list[Any]]:
            outputs = ({k: v for k, v in pair[side].items() if v.size} for pair in pairs)
            return name, [IterationResult(out, runner_name=name) for out in outputs]

        verdicts: dict[str, bool] = {}
        with _without_log(), np.errstate(invalid="ignore", divide="ignore"):
            accuracy = Comparator.compare_accuracy(
                RunResults([results(self.target.name, 1), results("pytorch", 0)]), compare_func=compare
            )
        compared = accuracy if hasattr(accuracy, "values") else accuracy[0]  # newer ones: one result per function
        for iteration in next(iter(compared.values())):
            for output, result in iteration.items():
                verdicts[output] = verdicts.get(output, True) and bool(result)
        return verdicts


def _within(pairs: Pairs, tolerance: Tolerance) -> bool:
    """Whether every part of every output keeps its bound, in half precision."""
    return all(
        max(part_medians(expected[name], actual[name]), default=0.0) <= tolerance.absolute[name]
        for expected, actual in pairs
        for name in expected
    )


def _simple_compare() -> Any:
    """Polygraphy's comparison by tolerances; its name depends on the version, and 0.49 is the last for TensorRT 8.6."""
    from polygraphy import comparator

    return getattr(comparator, "SimpleCompareFunc", None) or comparator.CompareFunc.simple


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Polygraphy without what it logs: it would write out every array and its statistics, shown or not, in most of its time."""
    from polygraphy import util
    from polygraphy.comparator import util as statistics
    from polygraphy.logger import G_LOGGER

    # Names of its inside: where one is gone, comparing takes longer and says the same.
    writers = ((util, "indent_block"), (statistics, "log_output_stats"))
    kept: list[tuple[Any, str, Any]] = [(m, name, getattr(m, name)) for m, name in writers if hasattr(m, name)]
    try:
        for module, name, _ in kept:
            setattr(module, name, lambda *_, **__: "")
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            yield
    finally:
        for module, name, writer in kept:
            setattr(module, name, writer)


def check_dtype(package: Package) -> None:
    """Raise UnsupportedError where NumPy lacks the package's type."""
    dtype = package.manifest["model"]["dtype"]
    if dtype not in ("float32", "float16"):
        raise UnsupportedError(
            f"the package's weights are {dtype}; polygraphy compares NumPy arrays, which have no bfloat16. "
            "Verify a float32 or float16 export of the same model."
        )


def report_of(case: Case, output: str, pairs: list[tuple[Arrays, Arrays]], bound: float, by_part: bool) -> OutputReport:
    """Errors of `output`, passed unless a number is none; `by_part`: medians of its parts are held to the bound."""
    errors = [distance(e[output], a[output]).ravel() for e, a in pairs]
    error = np.concatenate(errors)
    expected, actual = (
        np.concatenate([side[output].astype(np.float64).ravel() for side in sides])
        for sides in zip(*pairs, strict=True)
    )
    held = [part_medians(e[output], a[output]) for e, a in pairs] if by_part else errors
    largest = [float(np.max(each, initial=0)) for each in held]
    worst = int(np.argmax(largest))
    return OutputReport(
        case.name,
        output,
        float(error.max(initial=0)),
        float(error.mean()) if error.size else 0.0,
        _cosine(expected, actual),
        case.noise.get(output, Noise(0.0, 0.0, 0.0)).mean,
        bound,
        largest[worst],
        worst + 1,
        not np.isnan(error).any(),
    )


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm else 1.0
