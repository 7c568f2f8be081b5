"""Cases in a file: PyTorch answers on one machine, an engine is compared on another that has no PyTorch."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import PackageError
from still_export.package.calls import Arrays
from still_export.package.files import DATA, MODEL
from still_export.package.folder import Package
from still_export.proof.cases import EMPTY, Case, CaseSource
from still_kernels.ties import near_ties

ATTEMPTS = 3
"""Prompts kept of a case, where a near tie may call for another."""

FORMAT = 3


def record_cases(
    cases: CaseSource, package: Package, path: Path, progress: Callable[[str], None] = lambda done: None
) -> None:
    """Write the cases of `package` to `path`, whole or not at all; equal arrays are kept once."""
    arrays: dict[str, np.ndarray] = {}

    def keep(array: np.ndarray) -> str:
        content = np.ascontiguousarray(array)
        key = _name(content)
        arrays[key] = content
        return key

    def keep_all(call: Arrays) -> dict[str, str]:
        return {name: keep(array) for name, array in call.items()}

    entries: list[list[dict[str, Any]]] = [[] for _ in range(cases.count)]
    left = list(range(cases.count))
    for attempt in range(ATTEMPTS):
        if not left:
            break
        tied = []
        for number, case in zip(left, cases.draw(left), strict=True):
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
                }
            )
            if near_ties(case.leads):
                tied.append(number)
            if attempt == 0:
                progress(case.name)
        left = tied
    head = json.dumps({"format": FORMAT, "weights": _weights(package), "cases": entries})
    staging = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("wb") as file:
            np.savez_compressed(file, head=np.frombuffer(head.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        os.replace(staging, path)
    except OSError as error:
        raise PackageError(f"cannot write {path}: {error.strerror}.") from error
    finally:
        staging.unlink(missing_ok=True)


def _name(content: np.ndarray) -> str:
    """Of an array in the file: what it holds."""
    return hashlib.sha256(f"{content.dtype}{content.shape}".encode() + content.tobytes()).hexdigest()[:24]


def _weights(package: Package) -> str:
    """What tells the package's weights from others, whatever target they were lowered for."""
    files = package.manifest["files"]
    return str(package.manifest.get("portable") or files.get(DATA, files[MODEL])["sha256"])


class RecordedCases:
    """The cases that `record_cases` wrote.

    Raises:
        PackageError: The file is not readable, or belongs to other weights; of what is drawn, that it was changed.
    """

    def __init__(self, path: Path, package: Package) -> None:
        try:
            self._path, self._arrays = path, np.load(path)
            head = json.loads(self._arrays["head"].tobytes())
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise PackageError(f"{path} holds no recorded calls ({error}). Make it with --record.") from error
        if head.get("format") != FORMAT:
            raise PackageError(
                f"{path} holds answers of format {head.get('format')}, this version reads format {FORMAT}: older ones lack PyTorch's own "
                "error of every row. Record it again."
            )
        if head["weights"] != _weights(package):
            raise PackageError(f"{path} was recorded for other weights than those of {package.path}. Record it again.")
        self._cases: list[list[dict[str, Any]]] = head["cases"]
        self.count = len(self._cases)
        self._drawn = [0] * self.count

    def draw(self, numbers: Sequence[int], follow: Mapping[int, Sequence[np.ndarray]] = EMPTY) -> list[Case]:
        """The next prompts of these cases; the last once more where there are none left."""
        found = []
        for number in numbers:
            tries = self._cases[number]
            found.append(self._read(tries[min(self._drawn[number], len(tries) - 1)]))
            self._drawn[number] += 1
        return found

    def _array(self, key: str) -> np.ndarray:
        """The array of this name, which is what it holds.

        Raises:
            PackageError: It is another, or is gone.
        """
        try:
            found: np.ndarray = self._arrays[key]
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
            found = np.zeros(0)
        if _name(np.ascontiguousarray(found)) != key:
            raise PackageError(
                f"{self._path} was changed after it was recorded: {key} holds something else. Record it again."
            )
        return found

    def _read(self, entry: dict[str, Any]) -> Case:
        def read_all(keys: dict[str, str]) -> Arrays:
            return {name: self._array(key) for name, key in keys.items()}

        leads = {int(layer): self._array(key) for layer, key in entry["leads"].items()}
        return Case(
            entry["name"],
            [read_all(keys) for keys in entry["feeds"]],
            [read_all(keys) for keys in entry["expected"]],
            leads,
            tuple(self._array(key) for key in entry["steps"]),
            tuple(entry["places"]),
            None if entry["step_logits"] is None else self._array(entry["step_logits"]),
            [read_all(keys) for keys in entry["own"]],
            entry["own_mean"],
            tuple(entry["own_top1"]),
        )
