"""What two right runtimes may differ in, op by op. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Arrays = dict[str, np.ndarray]
Scores = dict[int, np.ndarray]
"""By layer (~layer of watched ops), what was compared to choose, in an array of the op's own."""

Leads = dict[int, np.ndarray]
"""By the same, how clearly the reference chose, in an array of the op's own: its lead, in parts of the lead that is a tie."""

TIE = 8.0
"""A lead is a tie up to so many times the error that PyTorch's own run makes in these very scores: what two of them differ by is spread
1.4 times as wide as one, and kernels that sum in half precision err two to three times as far as PyTorch."""
COARSE = 2.0
"""Times PyTorch's own error that a runtime's may have where turned choices are counted."""
CHOSEN = "chosen"
"""What PyTorch's run tells of a layer whose states show what is chosen: places of the tokens [B, HS, n, k], -1: none."""
SAME_TOKEN = 12.0
"""Times the error of PyTorch's own run in a number that a target's may differ by where both mean the same token: as any row of a half
precision state may (`still_export.proof.judge`)."""

Look = tuple[np.ndarray, Arrays]
"""Lengths [B] before some tokens, and the outputs of the call that brought the last of them."""

Pairs = list[tuple[Arrays, Arrays]]
"""Outputs of each call, (PyTorch, target)."""


@dataclass
class Choices:
    """Counts of what a runtime chooses by comparing numbers: compared, different where they nearly tie, different without a tie;
    `widest` is the largest lead among those that differ, in parts of the lead that is a tie. `expected` is the number of choices that
    rounding turns in a right runtime; it is a figure, since which they are follows from the processor. `unreported` are tokens with a choice
    that nearly ties and that the runtime does not report."""

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
    """Choices of one op that rounding may turn; `op_kernels.Op` names what makes them. PyTorch follows the runtime's choices where it can;
    `leads` below 0 are those of choices that it would have made otherwise."""

    score: str
    """The state that holds what is compared."""
    watched: str
    """The op whose first output says what was chosen, which a proof asks for; "": states show it."""

    def compare(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> Choices:
        """Compare what two runtimes chose, and what PyTorch followed with what it would have chosen; where the lead is a tie, either is
        right. `own` are errors of PyTorch's own run, of each pair by output (see `row_errors`): of a token that errs far there, the
        target's may, too, and is no other one."""

    def turned(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> list[dict[int, np.ndarray]]:
        """Of each pair by layer the sequences [B] in which the two sides chose otherwise on a near tie, as states show it."""

    def selected(self, calls: Sequence[Arrays]) -> dict[int, np.ndarray]:
        """What a runtime chose in calls one after the other, by layer, as PyTorch can follow it; nothing where states do not show it."""

    def chooses(self, lengths: np.ndarray) -> bool:
        """Whether a step after `lengths` [B] tokens chooses."""

    @property
    def span(self) -> int:
        """Tokens of a sequence at most whose scores the state still holds."""

    def scores(self, looks: Sequence[Look]) -> Scores:
        """All scores of sequences, of looks at most `span` of their tokens apart."""

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        """Of the reference's `scores`, beside those of PyTorch's own run in the package's type; infinity where nothing was chosen yet."""

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """The smallest lead of what was chosen along sequences of `counts` [B] tokens, in units of the scores."""


@runtime_checkable
class UnreportedTies(Protocol):
    """Choices that no state shows: a runtime tells them, or nobody knows."""

    def open_tokens(self, leads: Leads) -> dict[int, np.ndarray]:
        """Like Ties."""


class Ties:
    """The ties of all ops of a package, asked together."""

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
        """Like OpTies, the least of all; 0 where nothing is chosen."""
        return min((op.span for op in self.each), default=0)

    def scores(self, looks: Sequence[Look]) -> Scores:
        """Like OpTies; layers have one op each."""
        return {k: v for op in self.each for k, v in op.scores(looks).items()}

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        return {k: v for op in self.each for k, v in op.leads(_part(op, scores), own, counts).items()}

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """Like OpTies; infinity where nothing is chosen."""
        return min((op.closest(_part(op, scores), counts) for op in self.each), default=math.inf)

    def open_tokens(self, leads: Leads) -> dict[int, np.ndarray]:
        """By layer, tokens [B, N] with a choice that states do not show and that nearly ties: either answer is right."""
        return {k: v for op in self.each if isinstance(op, UnreportedTies) for k, v in op.open_tokens(leads).items()}

    @property
    def shown(self) -> Ties:
        """Those whose choices states show."""
        return Ties(op for op in self.each if not op.watched)

    def is_score(self, output: str) -> bool:
        """Whether `output` holds what an op compares, or what it chose."""
        return any(output.startswith(f"present_{name}.") for op in self.each for name in (op.score, CHOSEN))


def overruled(leads: Iterable[np.ndarray]) -> Choices:
    """Of choices that PyTorch followed, those that it would have made otherwise."""
    found = Choices()
    for lead in leads:
        found.near_ties += int(((lead < 0) & (lead >= -1)).sum())
        found.wrong += int((lead < -1).sum())
        found.widest = max(found.widest, float((-lead).max(where=np.isfinite(lead), initial=0)))
    return found


def _part(op: OpTies, scores: Scores) -> Scores:
    """What an op compared."""
    return {key: x for key, x in scores.items() if (key < 0) == bool(op.watched)}


def expected_ties(leads: Leads) -> float:
    """How many choices differ where a runtime errs COARSE times as far as PyTorch's own run, each score by itself."""
    found = np.concatenate([lead[np.isfinite(lead)].ravel() for lead in leads.values()] or [np.zeros(0)])
    return sum(0.5 * math.erfc(lead) for lead in np.abs(found * TIE / (2 * COARSE)).tolist())
