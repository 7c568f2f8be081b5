"""Choices in which two correct runtimes may differ, op by op. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Arrays = dict[str, np.ndarray]
Scores = dict[int, np.ndarray]
"""By layer (~layer for watched ops), the scores that a choice compares, in an array of the op's own."""

Leads = dict[int, np.ndarray]
"""By the same key, the reference's lead relative to the lead that counts as a tie, in an array of the op's own."""

TIE = 8.0
"""A lead is a tie up to this many times PyTorch's own error in these scores: differences of two runs spread 1.4 times as wide as one, and
kernels that sum in half precision err two to three times as far as PyTorch."""
COARSE = 2.0
"""Multiple of PyTorch's own error assumed for a runtime when expected turned choices are counted."""
CHOSEN = "chosen"
"""Output with PyTorch's choices for a layer whose states show the chosen: places of tokens [B, HS, n, k], -1: none."""
SAME_TOKEN = 12.0
"""Two keys are the same token if they differ by at most this many times PyTorch's own rounding error, as for any row of a half precision
state (`still_export.proof.judge`)."""

Look = tuple[np.ndarray, Arrays]
"""(lengths [B] before some tokens, outputs of the call with the last of them)."""

Pairs = list[tuple[Arrays, Arrays]]
"""Outputs of each call, (PyTorch, target)."""


@dataclass
class Choices:
    """Counts of a runtime's choices.

    compared: All. near_ties: Different at a near tie. wrong: Different without a tie. widest: The largest lead of a different choice,
    relative to a tie. expected: Choices that rounding turns in a correct runtime; a figure, because the processor decides which.
    unreported: Tokens with a near tie that the runtime does not report.
    """

    compared: int = 0
    near_ties: int = 0
    wrong: int = 0
    widest: float = 0.0
    expected: float = 0.0
    unreported: int = 0

    def add(self, other: Choices) -> None:
        self.compared += other.compared
        self.near_ties += other.near_ties
        self.wrong += other.wrong
        self.widest = max(self.widest, other.widest)
        self.expected += other.expected
        self.unreported += other.unreported


class OpTies(Protocol):
    """Choices of one op that rounding may turn; `op_kernels.Op` lists the implementations.

    PyTorch makes the runtime's choices where it can. Leads below 0 belong to choices that it would have made otherwise.
    """

    score: str
    """The state with the compared scores."""
    watched: str
    """The op whose first output has the choices; "": states show them."""

    def compare(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> Choices:
        """Compare the choices of two runtimes, and the choices PyTorch made with those it would have made. At a tie, either is right.

        own: Errors of PyTorch's own run, by output of each pair (see `row_errors`). A token that errs far there may err as far in the
        target.
        """

    def turned(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> list[dict[int, np.ndarray]]:
        """For each pair, by layer, the sequences [B] whose choices differ at a near tie, if states show them."""

    def selected(self, calls: Sequence[Arrays]) -> dict[int, np.ndarray]:
        """A runtime's choices in consecutive calls, by layer, in the form PyTorch can make; empty if states do not show them."""

    def chooses(self, lengths: np.ndarray) -> bool:
        """Whether a step after `lengths` [B] tokens chooses."""

    @property
    def span(self) -> int:
        """Most tokens of a sequence whose scores are in the state."""

    def scores(self, looks: Sequence[Look]) -> Scores:
        """All scores of sequences, from looks at most `span` tokens apart."""

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        """Leads of the reference's `scores`, relative to ties by PyTorch's own run in the package's type (`own`); infinity where nothing
        was chosen."""

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """The smallest lead of the choices along sequences of `counts` [B] tokens, in units of the scores."""


@runtime_checkable
class UnreportedTies(Protocol):
    """Ties whose choices no state shows: a runtime reports them, or they are unknown."""

    def open_tokens(self, leads: Leads) -> dict[int, np.ndarray]:
        """Like Ties."""


class Ties:
    """The ties of all ops of a package together."""

    def __init__(self, each: Iterable[OpTies] = ()) -> None:
        self.each = tuple(each)

    def compare(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> Choices:
        total = Choices()
        for op in self.each:
            total.add(op.compare(pairs, leads, own))
        return total

    def turned(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> list[dict[int, np.ndarray]]:
        found: list[dict[int, np.ndarray]] = [{} for _ in pairs]
        for op in self.each:
            for each, more in zip(found, op.turned(pairs, leads, own), strict=True):
                each.update(more)
        return found

    def selected(self, calls: Sequence[Arrays]) -> dict[int, np.ndarray]:
        return {k: v for op in self.each for k, v in op.selected(calls).items()}

    def chooses(self, lengths: np.ndarray) -> bool:
        return any(op.chooses(lengths) for op in self.each)

    @property
    def span(self) -> int:
        """Like OpTies, the smallest of all; 0 if nothing is chosen."""
        return min((op.span for op in self.each), default=0)

    def scores(self, looks: Sequence[Look]) -> Scores:
        """Like OpTies; layers have one op each."""
        return {k: v for op in self.each for k, v in op.scores(looks).items()}

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        return {k: v for op in self.each for k, v in op.leads(_part(op, scores), own, counts).items()}

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """Like OpTies; infinity if nothing is chosen."""
        return min((op.closest(_part(op, scores), counts) for op in self.each), default=math.inf)

    def open_tokens(self, leads: Leads) -> dict[int, np.ndarray]:
        """By layer, tokens [B, N] with a near tie that states do not show: either answer is right."""
        return {k: v for op in self.each if isinstance(op, UnreportedTies) for k, v in op.open_tokens(leads).items()}

    @property
    def shown(self) -> Ties:
        """Ties of ops whose choices states show."""
        return Ties(op for op in self.each if not op.watched)

    def is_score(self, output: str) -> bool:
        """Whether `output` holds compared scores, or choices."""
        return any(output.startswith(f"present_{name}.") for op in self.each for name in (op.score, CHOSEN))


def overruled(leads: Iterable[np.ndarray]) -> Choices:
    """Choices that PyTorch took from a runtime although its own scores say otherwise."""
    found = Choices()
    for lead in leads:
        found.near_ties += int(((lead < 0) & (lead >= -1)).sum())
        found.wrong += int((lead < -1).sum())
        found.widest = max(found.widest, float((-lead).max(where=np.isfinite(lead), initial=0)))
    return found


def _part(op: OpTies, scores: Scores) -> Scores:
    """The scores of an op."""
    return {key: x for key, x in scores.items() if (key < 0) == bool(op.watched)}


def expected_ties(leads: Leads) -> float:
    """Expected number of different choices if a runtime errs COARSE times as far as PyTorch's own run, each score independently."""
    found = np.concatenate([lead[np.isfinite(lead)].ravel() for lead in leads.values()] or [np.zeros(0)])
    return sum(0.5 * math.erfc(lead) for lead in np.abs(found * TIE / (2 * COARSE)).tolist())
