"""Recorded cases: PyTorch answers on one machine, and an engine is compared on another without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from still_export.package.calls import Arrays
from still_export.package.folder import Package
from still_export.proof.absolute import Overflow
from still_export.proof.answers import EMPTY, DecisionsByCase, Progress, Question, silent
from still_export.proof.array_file import ArrayFile, ArrayWriter, written_arrays
from still_export.proof.cases import Case, CaseSource

FORMAT = 5


def record_cases(
    cases: CaseSource,
    package: Package,
    path: Path,
    progress: Progress = silent,
    decisions: DecisionsByCase = EMPTY,
) -> None:
    """Write the cases of `package` to `path`, with the choices in `decisions`, atomically; equal arrays are stored once."""
    cases.progress = progress
    with written_arrays(path) as arrays:
        entries = []
        for number, case in enumerate(cases.draw(range(cases.count), decisions)):
            entries.append(_entry(case, arrays))
            progress("writing", number + 1, cases.count)
        arrays.finish("head", FORMAT, package, {"cases": entries, "followed": bool(decisions)})


def _entry(case: Case, arrays: ArrayWriter) -> dict[str, Any]:
    """A case as JSON; its arrays are written."""
    keep, keep_all = arrays.keep, arrays.keep_all
    return {
        "name": case.name,
        "feeds": [keep_all(f) for f in case.feeds],
        "expected": [keep_all(e) for e in case.expected],
        "leads": {str(layer): keep(lead) for layer, lead in case.leads.items()},
        "steps": [keep(s) for s in case.steps],
        "places": case.places,
        "step_logits": None if case.step_logits is None else keep(case.step_logits),
        "own": [keep_all(errors) for errors in case.own],
        "own_mean": case.own_mean,
        "own_top1": case.own_top1,
        "overflow": [None if x is None else vars(x) for x in (case.overflow, case.right_overflow)],
    }


class RecordedCases:
    """The cases that `record_cases` wrote. `has_decisions`: PyTorch used recorded choices of a runtime.

    Raises:
        PackageError: The file is not readable, belongs to other weights, or was changed. Changed arrays are found when they are drawn.
    """

    def __init__(self, path: Path, package: Package) -> None:
        self._file = ArrayFile(path, "head", FORMAT, package, "recorded calls", "--record")
        self._cases: list[dict[str, Any]] = self._file.head["cases"]
        self.has_decisions = bool(self._file.head.get("followed"))
        self.uses_decisions = False
        self.progress: Progress = silent
        self.count = len(self._cases)

    def begin(self, number: int) -> Question:
        entry = self._cases[number]
        keys = entry["feeds"][:1] if entry["steps"] else entry["feeds"]
        feeds = [self._arrays(keys[0])]
        feeds += [self._arrays({n: key for n, key in each.items() if not n.startswith("past_")}) for each in keys[1:]]
        return Question(feeds, tuple(self._file.array(key) for key in entry["steps"]), tuple(entry["places"]))

    def draw(self, numbers: Sequence[int], decisions: DecisionsByCase = EMPTY) -> list[Case]:
        """Like CaseSource, with the recording's decisions."""
        return [self._read(self._cases[number]) for number in numbers]

    def _arrays(self, keys: dict[str, str]) -> Arrays:
        return {name: self._file.array(key) for name, key in keys.items()}

    def _read(self, entry: dict[str, Any]) -> Case:
        leads = {int(layer): self._file.array(key) for layer, key in entry["leads"].items()}
        overflow, right = (None if x is None else Overflow(**x) for x in entry["overflow"])
        return Case(
            entry["name"],
            [self._arrays(keys) for keys in entry["feeds"]],
            [self._arrays(keys) for keys in entry["expected"]],
            leads,
            tuple(self._file.array(key) for key in entry["steps"]),
            tuple(entry["places"]),
            None if entry["step_logits"] is None else self._file.array(entry["step_logits"]),
            [self._arrays(keys) for keys in entry["own"]],
            entry["own_mean"],
            tuple(entry["own_top1"]),
            overflow=overflow,
            right_overflow=right,
        )
