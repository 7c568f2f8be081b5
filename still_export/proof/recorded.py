"""Cases in a file: PyTorch answers on one machine, an engine is compared on another that has no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from still_export.package.calls import Arrays
from still_export.package.folder import Package
from still_export.proof.absolute import Overflow
from still_export.proof.array_file import ArrayFile, ArrayWriter, written_arrays
from still_export.proof.cases import EMPTY, Case, CaseSource, Follow
from still_kernels.ties import near_ties

ATTEMPTS = 3
"""Prompts kept of a case, where a near tie may call for another."""
MOST_BYTES = 4 << 30
"""Beyond which no further prompts are kept: every long prompt of a large model has near ties, another one, too."""

FORMAT = 5


def record_cases(
    cases: CaseSource,
    package: Package,
    path: Path,
    progress: Callable[[str], None] = lambda done: None,
    told: Follow = EMPTY,
) -> None:
    """Write the cases of `package` to `path`, whole or not at all; equal arrays are kept once. Of cases that follow what they are `told`,
    whose prompts were begun, nothing that ties calls for another prompt."""
    with written_arrays(path) as arrays:
        entries = _record(cases, arrays, progress, told)
        arrays.finish("head", FORMAT, package, {"cases": entries, "followed": bool(told)})


def _record(
    cases: CaseSource, arrays: ArrayWriter, progress: Callable[[str], None], told: Follow
) -> list[list[dict[str, Any]]]:
    """The prompts of every case, whose arrays are kept."""
    keep, keep_all = arrays.keep, arrays.keep_all
    entries: list[list[dict[str, Any]]] = [[] for _ in range(cases.count)]
    left = list(range(cases.count))
    for attempt in range(ATTEMPTS):
        if not left or arrays.size_bytes > MOST_BYTES:
            break
        tied = []
        for number, case in zip(left, cases.draw(left, told), strict=True):
            entries[number].append(
                {
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
            )
            if near_ties(case.leads) and not told:
                tied.append(number)
            if attempt == 0:
                progress(case.name)
        left = tied
        arrays.seen.clear()
    return entries


class RecordedCases:
    """The cases that `record_cases` wrote; `followed`: PyTorch selected what a runtime had.

    Raises:
        PackageError: The file is not readable, or belongs to other weights, or was changed; of arrays that is seen when they are drawn.
    """

    follows = False

    def __init__(self, path: Path, package: Package) -> None:
        self._file = ArrayFile(path, "head", FORMAT, package, "recorded calls", "--record")
        self._cases: list[list[dict[str, Any]]] = self._file.head["cases"]
        self.followed = bool(self._file.head.get("followed"))
        self.count = len(self._cases)
        self._drawn = [0] * self.count

    def begin(self, number: int) -> Sequence[Arrays]:
        """Nothing: PyTorch has answered."""
        return ()

    def draw(self, numbers: Sequence[int], follow: Follow = EMPTY) -> list[Case]:
        """The next prompts of these cases; the last once more where there are none left."""
        found = []
        for number in numbers:
            tries = self._cases[number]
            found.append(self._read(tries[min(self._drawn[number], len(tries) - 1)]))
            self._drawn[number] += 1
        return found

    def _read(self, entry: dict[str, Any]) -> Case:
        def read_all(keys: dict[str, str]) -> Arrays:
            return {name: self._file.array(key) for name, key in keys.items()}

        overflow, right = (None if x is None else Overflow(**x) for x in entry["overflow"])
        leads = {int(layer): self._file.array(key) for layer, key in entry["leads"].items()}
        return Case(
            entry["name"],
            [read_all(keys) for keys in entry["feeds"]],
            [read_all(keys) for keys in entry["expected"]],
            leads,
            tuple(self._file.array(key) for key in entry["steps"]),
            tuple(entry["places"]),
            None if entry["step_logits"] is None else self._file.array(entry["step_logits"]),
            [read_all(keys) for keys in entry["own"]],
            entry["own_mean"],
            tuple(entry["own_top1"]),
            overflow=overflow,
            right_overflow=right,
            carried=self.followed,
        )
