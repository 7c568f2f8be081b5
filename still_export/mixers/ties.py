"""What two right runtimes may differ in, op by op. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from still_export.package.calls import Arrays

Leads = dict[int, np.ndarray]
"""By layer, how clearly the reference chose, in an array of the op's own."""

Ties = dict[str, float]
"""Leads below which rounding may turn a choice, by the output that holds the scores, "" of the others."""

Pairs = list[tuple[Arrays, Arrays]]
"""Outputs of each call, (PyTorch, target)."""


@dataclass
class Choices:
    """Counts of what a runtime chooses by comparing numbers: compared, different where they nearly tie, different without that excuse;
    `widest` is the largest lead among those that differ, in parts of the lead that is a tie."""

    compared: int = 0
    near_ties: int = 0
    wrong: int = 0
    widest: float = 0.0

    def add(self, other: Choices) -> None:
        """Add the counts of `other`."""
        self.compared += other.compared
        self.near_ties += other.near_ties
        self.wrong += other.wrong
        self.widest = max(self.widest, other.widest)


class Excuse(Protocol):
    """Choices of one op that rounding may turn."""

    score: str
    """The state that holds what is compared; twice the largest error of PyTorch's own half precision run on it is a tie."""

    def compare(self, pairs: Pairs, leads: Callable[[], Leads], ties: Ties) -> Choices:
        """Compare what two runtimes chose. `leads` is asked only where they differ; `ties` are the leads below which either is right."""

    def settle(self, pairs: Pairs, leads: Callable[[], Leads], ties: Ties) -> Pairs:
        """The pairs with PyTorch's choice wherever the target made another one on a near tie."""

    def alike(self, expected: Arrays, actual: Arrays) -> bool:
        """Whether two runtimes chose the same, up to the end of one call."""

    def chooses(self, lengths: np.ndarray) -> bool:
        """Whether a step after `lengths` [B] tokens chooses."""

    def near_ties(self, leads: Leads, ties: Ties) -> int:
        """How many of the reference's choices another right runtime may make otherwise."""

    def leads(self, reference: Any, tokens: np.ndarray, counts: np.ndarray) -> Leads:
        """The reference's leads on the sequences `tokens` [B, T] of `counts` [B] tokens; `reference` is a TorchModel."""

    def closest(self, leads: Leads, counts: np.ndarray) -> float:
        """The smallest lead of what was chosen along sequences of `counts` [B] tokens."""


class Excuses:
    """All excuses of a package, asked together."""

    def __init__(self, each: Iterable[Excuse] = ()) -> None:
        self.each = tuple(each)

    def compare(self, pairs: Pairs, leads: Callable[[], Leads], ties: Ties) -> Choices:
        """As of Excuse."""
        total = Choices()
        for excuse in self.each:
            total.add(excuse.compare(pairs, leads, ties))
        return total

    def settle(self, pairs: Pairs, leads: Callable[[], Leads], ties: Ties) -> Pairs:
        """As of Excuse."""
        for excuse in self.each:
            pairs = excuse.settle(pairs, leads, ties)
        return pairs

    def alike(self, expected: Arrays, actual: Arrays) -> bool:
        """As of Excuse."""
        return all(excuse.alike(expected, actual) for excuse in self.each)

    def chooses(self, lengths: np.ndarray) -> bool:
        """As of Excuse."""
        return any(excuse.chooses(lengths) for excuse in self.each)

    def near_ties(self, leads: Leads, ties: Ties) -> int:
        """As of Excuse."""
        return sum(excuse.near_ties(leads, ties) for excuse in self.each)

    def leads(self, reference: Any, tokens: np.ndarray, counts: np.ndarray) -> Leads:
        """As of Excuse; layers have one op each."""
        return {k: v for excuse in self.each for k, v in excuse.leads(reference, tokens, counts).items()}

    def closest(self, leads: Leads, counts: np.ndarray) -> float:
        """As of Excuse; infinity where nothing is chosen."""
        return min((excuse.closest(leads, counts) for excuse in self.each), default=math.inf)

    def is_score(self, output: str) -> bool:
        """Whether `output` holds what an op compares."""
        return any(output.startswith(f"present_{excuse.score}.") for excuse in self.each)
