"""A file of a runtime's selections at near ties, which PyTorch on another machine repeats. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from still_export.errors import PackageError
from still_export.package.folder import Package
from still_export.proof.answers import Decisions, DecisionsByCase, Progress, Question, ask
from still_export.proof.array_file import ArrayFile, written_arrays
from still_export.proof.prompts import Prompts, Ranges
from still_export.proof.sessions import Session

KIND, FORMAT = "selections", 4


class Prompted(Protocol):
    count: int

    def begin(self, number: int) -> Question: ...


def write_selections(session: Session, prompts: Prompts, package: Package, path: Path, progress: Progress) -> None:
    """Write a runtime's selections for `prompts` to `path`, atomically."""
    with written_arrays(path) as arrays:
        hashes, selected = [], []
        for number in range(prompts.count):
            question = prompts.begin(number)
            decisions = ask(session, question, prompts.ties.shown, keep=False).decisions
            hashes.append(_tokens(question))
            selected.append({str(layer): arrays.keep(keys) for layer, keys in decisions.selected.items()})
            progress("asking the runtime", number + 1, prompts.count)
        # The other machine may lack what renders the chat format.
        content = {"ranges": asdict(prompts.ranges), "words": prompts.words, "prompts": hashes, "kept": selected}
        arrays.finish(KIND, FORMAT, package, content)


@dataclass(frozen=True)
class Selections:
    """Hashes of prompts, and their selections, as `write_selections` wrote them."""

    path: Path
    ranges: Ranges
    words: list[int]
    prompts: list[str]
    decisions: DecisionsByCase

    @classmethod
    def read(cls, path: Path, package: Package) -> Selections:
        """The selections in `path`.

        Raises:
            PackageError: The file is not readable, or belongs to other weights, or was changed.
        """
        file = ArrayFile(path, KIND, FORMAT, package, "selections", "--selections")
        head = file.head
        selected = [{int(layer): file.array(key) for layer, key in each.items()} for each in head["kept"]]
        decisions = {number: Decisions((), each) for number, each in enumerate(selected)}
        values: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in head["ranges"].items()}
        ranges = Ranges(**values)
        return cls(path, ranges, head["words"], head["prompts"], decisions)

    def begin(self, cases: Prompted) -> None:
        """Draw the prompts of all cases.

        Raises:
            PackageError: They differ from those in the file.
        """
        if [_tokens(cases.begin(number)) for number in range(cases.count)] != self.prompts:
            raise PackageError(
                f"{self.path} holds what was selected in other prompts than those of this package: its engine has other batches, "
                "or another version wrote the file. Make it again with --selections, and give --record the package as it was built."
            )


def _tokens(question: Question) -> str:
    """Hash of the tokens of some calls."""
    found = hashlib.sha256()
    for part in [*(call[name] for call in question.feeds for name in ("input_ids", "new_tokens")), *question.steps]:
        array = np.ascontiguousarray(part, np.int64)
        found.update(f"{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:24]
