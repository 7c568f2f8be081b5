"""Who guesses the next tokens, and when that pays: n-grams of what was read and said, unless another does; measured while it runs.

Exports copy this file into packages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

LEAST, LONGEST = 3, 8
"""Tokens of an n-gram that is looked up: two are too often followed by something else; more than eight find nothing that eight do not."""
FIRST = 4
"""Guesses of the first step; each that holds whole doubles them, another one leaves one more than held."""
MEASURED = 9
"""Plain steps whose median is a plain step's time; two are enough to begin with."""
SHARE = 0.01
"""Of the time of plain steps, what guesses may lose."""
RESERVE, DOUBT = 2, 4
"""Plain steps whose time guesses may lose of what they won before, and those beyond which only time makes up; before, an n-gram must be
LONGEST."""


class Guesser(Protocol):
    """Guesses what follows the tokens of one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """These follow what it knows."""

    def guess(self, most: int, least: int) -> list[int]:
        """Tokens that may follow, at most `most`; an n-gram that is looked up has at least `least`."""


class Lookup:
    """Guesses what followed the latest tokens where they stood last.

    Args:
        tokens: Known so far.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """As of Guesser."""
        for token in tokens:
            end = len(self._tokens)  # n-grams are known once something follows them
            for size in {LEAST, LONGEST}:
                if end >= size:
                    self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def guess(self, most: int, least: int) -> list[int]:
        """As of Guesser."""
        for size in (LONGEST, LEAST):
            end = self._ends.get(tuple(self._tokens[-size:])) if size >= least else None
            if end is not None:  # beyond what is known it goes on as what is guessed
                return [self._tokens[end + i % (len(self._tokens) - end)] for i in range(most)]
        return []


class Speculation:
    """When a model's steps have guesses, and what they won.

    Args:
        most: Guesses of a step at most.
        guesser: Makes one for a sequence that begins with these tokens.

    Attributes:
        steps: With guesses. guesses, held: Of those, together. won_s: Seconds that plain steps would have taken more.
    """

    def __init__(self, most: int, guesser: Callable[[Sequence[int]], Guesser] = Lookup) -> None:
        self.most, self.guesser = most, guesser
        self.steps = self.guesses = self.held = 0
        self.won_s = 0.0
        self._plain: dict[int, deque[float]] = {}
        self._balance = 0.0
        self._wanted = min(FIRST, most)
        self._known: set[tuple[int, int]] = set()

    def guess(self, guesser: Guesser, most: int, sequences: int = 1) -> list[int]:
        """What a step of so many sequences may take of `guesser`, at most `most`; nothing where guesses lose."""
        plain = self._plain_s(sequences)
        if most < 1 or not plain or self._balance < -DOUBT * plain:
            return []
        return guesser.guess(min(most, self._wanted), LEAST if self._balance >= 0 else LONGEST)

    def plain(self, seconds: float, sequences: int = 1) -> None:
        """A step without guesses took so long."""
        self._plain.setdefault(sequences, deque(maxlen=MEASURED)).append(seconds)
        if self._balance < 0:
            self._balance += SHARE * seconds

    def guessed(self, seconds: float, guesses: Sequence[int], held: Sequence[int]) -> None:
        """A step took so long, in which each sequence had so many guesses, of which so many held."""
        self.steps += 1
        self.guesses += sum(guesses)
        self.held += sum(held)
        plain = self._plain_s(len(guesses))
        won = (1 + sum(held) / len(held)) * plain - seconds
        self.won_s += won
        kind = len(guesses), max(guesses)
        if kind in self._known:  # the first of a kind prepares what others find
            self._balance = min(self._balance + won, RESERVE * plain)
        self._known.add(kind)
        best = max(held)
        self._wanted = min(self.most, 2 * self._wanted if best == max(guesses) else max(2, best + 1))

    def _plain_s(self, sequences: int) -> float:
        """A plain step's time; 0: not known yet."""
        measured = self._plain.get(sequences, ())
        return median(measured) if len(measured) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "steps": self.steps,
            "guessed_tokens": self.guesses,
            "accepted_tokens": self.held,
            "accepted_a_step": round(self.held / max(1, self.steps), 2),
            "won_s": round(self.won_s, 3),
        }
