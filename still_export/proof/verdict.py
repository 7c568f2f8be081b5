"""Results of a proof: passed and failed checks, and what was not checked. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

SHOWN = 4
"""Further findings in a check's notes."""


class Kind(StrEnum):
    """What a check is about."""

    REFERENCE, NUMBERS, WEIGHTS = "reference", "numbers", "weights"
    READING, SETTINGS, FILES = "reading", "settings", "files"


WRONG = {
    Kind.REFERENCE: "PyTorch's own answers cannot judge it",
    Kind.NUMBERS: "the package does not compute what PyTorch computes",
    Kind.WEIGHTS: "its weights are not the model's",
    Kind.READING: "the model's files were not read as other programs read them",
    Kind.SETTINGS: "its tokenizer or settings are not the model's",
    Kind.FILES: "its files are not what this version exports from the model: another version made them, or they were changed; "
    "export it again",
}
"""What is wrong if a check of a kind fails, in the order of a verdict."""


@dataclass(frozen=True)
class Check:
    """A checked fact besides the compared outputs.

    Args:
        name: What must be true, in words: "scales equal the file's".
        what: What was found, in one sentence.
        where: The tensor, layer, file or token of the worst finding.
        value, bound: The worst finding and what it may be, where both are numbers.
        kind: What it is about.
    """

    name: str
    passed: bool
    what: str = ""
    where: str = ""
    value: float | None = None
    bound: float | None = None
    notes: tuple[str, ...] = ()
    kind: Kind = Kind.NUMBERS

    @classmethod
    def of(cls, name: str, wrong: Sequence[tuple[str, str]]) -> Check:
        """A check that no fault was found. `wrong`: (place, sentence) of each; the first becomes the finding, the next ones notes."""
        where, what = wrong[0] if wrong else ("", "")
        more = f"; {len(wrong)} are not" if len(wrong) > 1 else ""
        return cls(name, not wrong, what + more, where, notes=tuple(text for _, text in wrong[1 : 1 + SHOWN]))

    def __str__(self) -> str:
        numbers = "" if self.value is None else f"{self.value:.3g}"
        numbers += "" if self.value is None or self.bound is None else f", bound {self.bound:.3g}"
        found = "; ".join(filter(None, (self.where, self.what, numbers)))
        outcome = "yes" if self.passed else "NO"
        return f"{self.name}: {outcome}" + (f", {found}" if found and not self.passed else "")


@dataclass
class Verdict:
    """Checks, and what was not checked, one line each, printed next to PASSED."""

    checks: list[Check] = field(default_factory=list)
    not_asked: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def add(self, other: Verdict) -> None:
        self.checks += other.checks
        self.not_asked += [line for line in other.not_asked if line not in self.not_asked]

    def of_kind(self, kind: Kind) -> Verdict:
        return Verdict([replace(check, kind=kind) for check in self.checks], self.not_asked)

    @classmethod
    def of(cls, checks: Iterable[Check]) -> Verdict:
        return cls(list(checks))

    def to_dict(self) -> dict[str, Any]:
        return {"checks": [vars(check) for check in self.checks], "not_asked": self.not_asked}
