"""A question to a subject (the calls of one case) and its answer. Knows no reference and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from still_export.package.calls import Arrays
from still_export.proof.codes import as_numbers
from still_export.proof.sessions import Session
from still_export.proof.spill import SpillFile
from still_kernels.ties import Ties


@dataclass(frozen=True)
class Question:
    """Calls, then single-token steps, each from the state after the previous one.

    Args:
        feeds: Inputs of the calls; the first has the initial states.
        steps: Tokens [B, 1] after the last call.
        places: Steps whose outputs are compared one by one; steps between them are compared together.
    """

    feeds: Sequence[Arrays]
    steps: tuple[np.ndarray, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def groups(self) -> list[tuple[np.ndarray, ...]]:
        """Steps that are compared together."""
        found, done = [], 0
        for place in self.places:
            found += (
                [self.steps[done:place], self.steps[place : place + 1]]
                if place > done
                else [self.steps[place : place + 1]]
            )
            done = place + 1
        return found


@dataclass(frozen=True)
class Decisions:
    """Choices of a runtime at near ties, which the reference repeats.

    Args:
        seen: Chosen experts [B, N, k] of each routing layer.
        selected: Selected keys by layer; see `OpTies.kept`.
    """

    seen: Sequence[np.ndarray] = ()
    selected: Mapping[int, np.ndarray] = field(default_factory=dict)

    def is_like(self, other: Decisions | None, near: float = 0.0) -> bool:
        """Whether both have the same choices. Numeric ones may differ by `near` times the largest."""
        if other is None or self.selected.keys() != other.selected.keys() or len(self.seen) != len(other.seen):
            return False
        pairs = [
            *zip(self.seen, other.seen, strict=True),
            *((x, other.selected[layer]) for layer, x in self.selected.items()),
        ]
        return all(_alike(a, b, near) for a, b in pairs)


def _alike(a: np.ndarray, b: np.ndarray, near: float) -> bool:
    if a.dtype.kind != "f" or a.shape != b.shape or not a.size:
        return np.array_equal(a, b)
    most = float(np.abs(a).max(initial=0, where=np.isfinite(a)))
    return np.allclose(a, b, rtol=0, atol=near * most, equal_nan=True)


Progress = Callable[[str, int, int], None]
"""Called with (phase, work done, work in all)."""


def silent(phase: str, done: int, total: int) -> None: ...


DecisionsByCase = Mapping[int, Decisions]
"""By case number."""
EMPTY: DecisionsByCase = {}


@dataclass(frozen=True)
class Answer:
    """Outputs of each call of a question, then of each group of its steps, with the runtime's choices."""

    outputs: list[Arrays]
    decisions: Decisions


def ask(session: Session, question: Question, ties: Ties, keep: bool = True) -> Answer:
    """Answer one question on the runtime.

    Args:
        ties: The package's ties, which read selections from states.
        keep: Keep the outputs, in a file until they are read.
    """
    session.seen()
    outputs = session.carry(question.feeds)
    outputs += [session.step(group) for group in question.groups]
    decisions = Decisions(session.seen(), ties.selected([as_numbers(call) for call in outputs]))
    if not keep:
        return Answer([], decisions)
    spill = SpillFile()
    spill.take(outputs, "")
    spill.restore()
    return Answer(outputs, decisions)
