"""What a runtime selects where scores nearly tie, in a file: on another machine PyTorch answers, and selects the same; without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from still_export.errors import PackageError
from still_export.package.calls import Arrays
from still_export.package.folder import Package
from still_export.proof.array_file import ArrayFile, written_arrays
from still_export.proof.cases import Follow, Told
from still_export.proof.codes import as_numbers
from still_export.proof.prompts import Prompts
from still_export.proof.sessions import Session
from still_export.proof.shelf import Shelf
from still_kernels.ties import Ties

KIND, FORMAT = "selections", 1


class Begun(Protocol):
    """As of CaseSource."""

    count: int

    def begin(self, number: int) -> Sequence[Arrays]:
        """As of CaseSource."""


def told_by(
    session: Session, cases: Begun, ties: Ties, progress: Callable[[Sequence[Arrays]], None] = lambda calls: None
) -> dict[int, Told]:
    """What a runtime selects in each case before its first step, and its outputs of the first call. `progress` is told each case's
    calls."""
    found = {}
    for number in range(cases.count):
        asked, shelf = cases.begin(number), Shelf()
        calls = session.carry(asked)
        found[number] = Told((), ties.kept([as_numbers(call) for call in calls]), calls[0])
        shelf.take(calls[:1], "")
        shelf.put_back()
        session.seen()
        progress(asked)
    return found


def write_selections(
    session: Session, prompts: Prompts, package: Package, path: Path, progress: Callable[[str], None]
) -> None:
    """Write to `path` what a runtime selects in `prompts`, whole or not at all."""
    asked: list[str] = []

    def done(calls: Sequence[Arrays]) -> None:
        asked.append(_tokens(calls))
        progress(prompts.drawn[len(asked) - 1].name)

    told = told_by(session, prompts, prompts.ties.shown, done)
    with written_arrays(path) as arrays:
        kept = [{str(layer): arrays.keep(keys) for layer, keys in told[number].kept.items()} for number in sorted(told)]
        content = {"lengths": prompts.lengths, "decode_steps": prompts.decode_steps, "seed": prompts.seed}
        arrays.finish(KIND, FORMAT, package, {**content, "prompts": asked, "kept": kept})


@dataclass(frozen=True)
class Selections:
    """What `write_selections` wrote: in which prompts, and what was selected there."""

    path: Path
    lengths: tuple[int, ...]
    decode_steps: int
    seed: int
    prompts: list[str]
    told: Follow

    @classmethod
    def read(cls, path: Path, package: Package) -> Selections:
        """The selections in `path`.

        Raises:
            PackageError: The file is not readable, or belongs to other weights, or was changed.
        """
        file = ArrayFile(path, KIND, FORMAT, package, "selections", "--selections")
        head = file.head
        kept = [{int(layer): file.array(key) for layer, key in each.items()} for each in head["kept"]]
        told = {number: Told((), each) for number, each in enumerate(kept)}
        return cls(path, tuple(head["lengths"]), head["decode_steps"], head["seed"], head["prompts"], told)

    def begin(self, cases: Begun) -> None:
        """Draw the prompts of all cases, which have to be those that the runtime was asked.

        Raises:
            PackageError: They are others.
        """
        if [_tokens(cases.begin(number)) for number in range(cases.count)] != self.prompts:
            raise PackageError(
                f"{self.path} holds what was selected in other prompts than those of this package: its engine takes other batches, "
                "or another version wrote the file. Make it again with --selections, and give --record the package as it was built."
            )


def _tokens(calls: Sequence[Arrays]) -> str:
    """Of the tokens of some calls."""
    found = hashlib.sha256()
    for call in calls:
        for name in ("input_ids", "new_tokens"):
            array = np.ascontiguousarray(call[name], np.int64)
            found.update(f"{array.shape}".encode())
            found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:24]
