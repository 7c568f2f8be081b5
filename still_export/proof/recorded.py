"""Cases in a file: PyTorch answers on one machine, an engine is compared on another that has no PyTorch."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import PackageError
from still_export.package.calls import Arrays
from still_export.package.files import DATA, MODEL
from still_export.package.folder import Package
from still_export.proof.cases import EMPTY, Case, CaseSource, Follow
from still_kernels.ties import near_ties

ATTEMPTS = 3
"""Prompts kept of a case, where a near tie may call for another."""
MOST_BYTES = 4 << 30
"""Beyond which no further prompts are kept: every long prompt of a large model has near ties, another one, too."""

FORMAT = 4


def record_cases(
    cases: CaseSource, package: Package, path: Path, progress: Callable[[str], None] = lambda done: None
) -> None:
    """Write the cases of `package` to `path`, whole or not at all; equal arrays are kept once."""
    staging = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(staging, "w") as file:
            entries = _record(cases, _Arrays(file), progress)
            head = {"format": FORMAT, "weights": _weights(package), "cases": entries}
            text = json.dumps({**head, "digest": _digest(head)})
            _write(file, "head", np.frombuffer(text.encode(), np.uint8), zipfile.ZIP_DEFLATED)
        os.replace(staging, path)
    except OSError as error:
        raise PackageError(f"cannot write {path}: {error.strerror}.") from error
    finally:
        staging.unlink(missing_ok=True)


def _record(cases: CaseSource, arrays: _Arrays, progress: Callable[[str], None]) -> list[list[dict[str, Any]]]:
    """The prompts of every case, whose arrays are kept."""
    keep, keep_all = arrays.keep, arrays.keep_all
    entries: list[list[dict[str, Any]]] = [[] for _ in range(cases.count)]
    left = list(range(cases.count))
    for attempt in range(ATTEMPTS):
        if not left or arrays.size_bytes > MOST_BYTES:
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
        arrays.seen.clear()
    return entries


class _Arrays:
    """Arrays that are written to a file as they come, each once. Numbers do not compress; zeros, of which states of short prompts consist,
    do."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file, self.size_bytes = file, 0
        self._written: set[str] = set()
        self.seen: dict[int, tuple[np.ndarray, str]] = {}
        """Names of arrays in memory."""

    def keep(self, array: np.ndarray) -> str:
        """Write an array; its name."""
        if id(array) in self.seen:
            return self.seen[id(array)][1]
        content = np.ascontiguousarray(array)
        key = _name(content)
        self.seen[id(array)] = array, key
        if key not in self._written:
            self._written.add(key)
            _write(self._file, key, content, zipfile.ZIP_STORED if content.any() else zipfile.ZIP_DEFLATED)
            self.size_bytes += content.nbytes if content.any() else 0
        return key

    def keep_all(self, call: Arrays) -> dict[str, str]:
        """Names of the arrays of a call."""
        return {name: self.keep(array) for name, array in call.items()}


def _write(file: zipfile.ZipFile, name: str, array: np.ndarray, compression: int) -> None:
    """An array as NumPy's own archives have it."""
    member = zipfile.ZipInfo(f"{name}.npy")
    member.compress_type = compression
    with file.open(member, "w", force_zip64=True) as out:
        np.lib.format.write_array(out, array, allow_pickle=False)


def _name(content: np.ndarray) -> str:
    """Of an array in the file: what it holds."""
    found = hashlib.sha256(f"{content.dtype}{content.shape}".encode())
    if content.size:
        found.update(content.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:24]


def _digest(head: dict[str, Any]) -> str:
    """Of all that the head says: means and places are in no array."""
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()


def _weights(package: Package) -> str:
    """What tells the package's weights from others, whatever target they were lowered for."""
    files = package.manifest["files"]
    return str(package.manifest.get("portable") or files.get(DATA, files[MODEL])["sha256"])


class RecordedCases:
    """The cases that `record_cases` wrote.

    Raises:
        PackageError: The file is not readable, or belongs to other weights, or was changed; of arrays that is seen when they are drawn.
    """

    follows = False

    def __init__(self, path: Path, package: Package) -> None:
        try:
            self._path, self._arrays = path, np.load(path)
            head = json.loads(self._arrays["head"].tobytes())
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise PackageError(f"{path} holds no recorded calls ({error}). Make it with --record.") from error
        if head.get("format") != FORMAT:
            raise PackageError(
                f"{path} holds answers of format {head.get('format')}, this version reads format {FORMAT}. Record it again."
            )
        if head.get("weights") != _weights(package):
            raise PackageError(f"{path} was recorded for other weights than those of {package.path}. Record it again.")
        if head.pop("digest", None) != _digest(head):
            raise PackageError(f"{path} was changed after it was recorded. Record it again.")
        self._cases: list[list[dict[str, Any]]] = head["cases"]
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
