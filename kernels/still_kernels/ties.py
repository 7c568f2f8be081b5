"""Choices that two correct runtimes may make differently, by op. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Arrays = dict[str, np.ndarray]
Scores = dict[int, np.ndarray]
"""By layer (~layer of watched ops): the compared numbers, in an array of the op's own form."""

Leads = dict[int, np.ndarray]
"""By layer: how clearly the reference chose, in an array of the op's own form. Unit: the lead that is a tie."""

TIE = 8.0
"""A lead is a tie up to this many times the rounding error of PyTorch's own run in these scores. The difference of two runs spreads 1.4
times as wide as one run's error, and kernels that sum in half precision err two to three times as far as PyTorch."""
COARSE = 2.0
"""Factor between PyTorch's error and an allowed runtime's error when changed choices are counted."""
CHOSEN = "chosen"
"""Key of PyTorch's choices in a layer whose states show them: positions of tokens [B, HS, n, k], -1: none."""
SAME_TOKEN = 12.0
"""Two keys are the same token if they differ by at most this many times PyTorch's own rounding error, the bound of any row of a half
precision state (`still_export.proof.judge`)."""

Look = tuple[np.ndarray, Arrays]
"""(lengths [B] before some tokens, outputs of the call with the last of them)."""

Pairs = list[tuple[Arrays, Arrays]]
"""(PyTorch's outputs, target's outputs) for each call."""


@dataclass
class Choices:
    """Counts of a runtime's choices by comparison.

    compared: All choices.
    near_ties, wrong: Choices that differ on a near tie, and without one.
    widest: Largest lead among differing choices, in units of the lead that is a tie.
    expected: Number of choices that rounding changes in a correct runtime, for reports only, because the processor decides which ones.
    untold: Tokens with a near tie that the runtime does not report.
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
    """Choices of one op that rounding may change; `op_kernels.Op` names the class. PyTorch follows the runtime's choices where possible.
    Negative `leads` are choices that PyTorch would have made differently."""

    score: str
    """The state with the compared numbers."""
    watched: str
    """The op whose first output is the choice, which a proof requests; "": states show it."""

    def compare(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> Choices:
        """Compare the choices of two runtimes, and those that PyTorch followed with its own; on a tie either is right.

        Args:
            own: Errors of PyTorch's own run, by pair and output (see `row_errors`). A token with a large error there may have a large error
                in the target, too, and still be the same token.
        """

    def turned(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> list[dict[int, np.ndarray]]:
        """By pair and layer, the sequences [B] in which the two sides chose differently on a near tie, according to the states."""

    def selected(self, calls: Sequence[Arrays]) -> dict[int, np.ndarray]:
        """A runtime's choices in consecutive calls, by layer, in the form PyTorch can make; empty if states do not show them."""

    def chooses(self, lengths: np.ndarray) -> bool:
        """Whether a step after `lengths` [B] tokens makes a choice."""

    @property
    def span(self) -> int:
        """Most tokens of a sequence whose scores are still in the state."""

    def scores(self, looks: Sequence[Look]) -> Scores:
        """All scores of sequences, from looks at most `span` tokens apart."""

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        """Leads of the reference's `scores`, with errors from PyTorch's own run in the package's type; infinity before the first choice."""

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """Smallest lead among the choices of sequences of `counts` [B] tokens, in units of the scores."""


@runtime_checkable
class UnreportedTies(Protocol):
    """Ties whose choices no state shows: a runtime reports them, or they are unknown."""

    def open_tokens(self, leads: Leads) -> dict[int, np.ndarray]:
        """Like Ties."""


class Ties:
    """The ties of all ops of a package."""

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
        """Smallest `span` of all ops; 0 without choices."""
        return min((op.span for op in self.each), default=0)

    def scores(self, looks: Sequence[Look]) -> Scores:
        """See `OpTies.scores`; layers have one op each."""
        return {k: v for op in self.each for k, v in op.scores(looks).items()}

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        return {k: v for op in self.each for k, v in op.leads(_part(op, scores), own, counts).items()}

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """See `OpTies.closest`; infinity without choices."""
        return min((op.closest(_part(op, scores), counts) for op in self.each), default=math.inf)

    def open_tokens(self, leads: Leads) -> dict[int, np.ndarray]:
        """By layer, tokens [B, N] with a near tie that states do not show: either answer is right."""
        return {k: v for op in self.each if isinstance(op, UnreportedTies) for k, v in op.open_tokens(leads).items()}

    @property
    def shown(self) -> Ties:
        """Ops whose choices are in states."""
        return Ties(op for op in self.each if not op.watched)

    def is_score(self, output: str) -> bool:
        """Whether `output` has an op's compared numbers or its choices."""
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
    """An op's part of the scores."""
    return {key: x for key, x in scores.items() if (key < 0) == bool(op.watched)}


def expected_ties(leads: Leads) -> float:
    """Number of choices that differ if a runtime errs COARSE times as far as PyTorch's own run, each score independently."""
    found = np.concatenate([lead[np.isfinite(lead)].ravel() for lead in leads.values()] or [np.zeros(0)])
    return sum(0.5 * math.erfc(lead) for lead in np.abs(found * TIE / (2 * COARSE)).tolist())
