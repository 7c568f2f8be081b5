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
HITS = {LONGEST: 0.8, LEAST: 0.4, 0: 0.7}
"""By how sure a guess is (tokens of its n-gram; 0: a model's), how often its next token holds, before that is known."""
LEARNED = 0.1
"""Part of each token that was said in that share."""
MORE = 0.35
"""Time of a step that each guess adds to it, in plain steps, before that is known."""
FURTHER = 0.5
"""Of the time that each guess of a measured kind adds, what one more is taken to."""
MEASURED, KEPT = 9, 64
"""Steps of a kind whose median is its time, of plain ones two to begin with; plain steps after which one with guesses is forgotten."""
FIRST = 4
"""Guesses at most, where no more than half of them held last."""
SHARE, RESERVE = 0.01, 2
"""Of the time of plain steps, what guesses may lose; plain steps whose time they may lose of what they won before."""


class Guesser(Protocol):
    """Guesses what follows the tokens of one sequence.

    Attributes:
        outcomes: Of tokens that were said, how sure a guess of them was, and whether it held; for who wants to learn and empties it.
    """

    outcomes: list[tuple[int, bool]]

    def extend(self, tokens: Sequence[int]) -> None:
        """These follow what it knows."""

    def sure(self) -> int | None:
        """How sure its next guess is, a key of HITS; None: it has none."""

    def guess(self, most: int) -> list[int]:
        """Tokens that may follow, at most `most`."""


class Guessed:
    """What guessers by a model have in common: each guess is as sure as another.

    Args:
        tokens: Known so far.

    Attributes:
        tokens: All tokens so far. guesses: The last ones, until their outcome is known.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.guesses = list(tokens), list[int]()
        self.outcomes: list[tuple[int, bool]] = []

    def extend(self, tokens: Sequence[int]) -> None:
        for guess, token in zip(self.guesses, tokens, strict=False):
            self.outcomes.append((0, guess == token))
        self.tokens += tokens
        self.guesses = []

    def sure(self) -> int | None:
        return 0


def look_up(tokens: Sequence[int], sequence: int = 0) -> Lookup:
    """A guesser by n-grams, of any sequence."""
    return Lookup(tokens)


class Lookup:
    """Guesses what followed the latest tokens where they stood last.

    Args:
        tokens: Known so far.

    Attributes:
        tokens: All that it knows.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.outcomes: list[tuple[int, bool]] = []
        self.extend(tokens)
        self.outcomes.clear()  # a prompt's own repetitions say nothing about answers

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            sure, end = self._found()
            if sure is not None:
                self.outcomes.append((sure, self.tokens[end] == token))
            end = len(self.tokens)  # n-grams are known once something follows them
            for size in (LEAST, LONGEST):
                if end >= size:
                    self._ends[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def _found(self) -> tuple[int | None, int]:
        """Size of the longest n-gram at the end that stood before, and where what followed it begins."""
        for size in (LONGEST, LEAST):
            end = self._ends.get(tuple(self.tokens[-size:]))
            if end is not None:
                return size, end
        return None, 0

    def sure(self) -> int | None:
        return self._found()[0]

    def guess(self, most: int) -> list[int]:
        """Like Guesser; beyond what is known it goes on as what is guessed."""
        sure, end = self._found()
        return [] if sure is None else [self.tokens[end + i % (len(self.tokens) - end)] for i in range(most)]


class Speculation:
    """When a model's steps have guesses, how many, and what they won.

    A step gets the number, of powers of two, with which most tokens are said in its time, by how often guesses as sure as this one held
    and how long steps of so many took; none where a plain step says as many.

    Args:
        most: Guesses of a step at most.
        guesser: Makes one for a sequence that begins with these tokens, and has this number.

    Attributes:
        steps: With guesses. guesses, held: Of those, together. won_s: Seconds that plain steps would have taken more.
    """

    def __init__(self, most: int, guesser: Callable[[Sequence[int], int], Guesser] = look_up) -> None:
        self.most, self.guesser = most, guesser
        self.steps = self.guesses = self.held = 0
        self.won_s = 0.0
        self._hits = dict(HITS)
        self._times: dict[tuple[int, int], deque[float]] = {}  # by sequences and guesses of a step
        self._balance, self._since, self._last = 0.0, 0, 0

    def guess(self, guesser: Guesser, most: int, sequences: int = 1) -> list[int]:
        """What a step of so many sequences may take of `guesser`, at most `most`; nothing where guesses lose."""
        for sure, held in guesser.outcomes:
            self._hits[sure] += LEARNED * (held - self._hits[sure])
        guesser.outcomes.clear()
        known = len(self._times.get((sequences, 0), ())) > 1
        kind = guesser.sure() if most > 0 and known and self._balance >= 0 else None
        if kind is None:
            return []
        sizes = [1 << i for i in range(self.most.bit_length())] + [self.most]
        share = min(self._hits[kind], 0.99)
        most = min(most, max(FIRST, 2 * self._last))
        said = {n: (1 - share ** (n + 1)) / (1 - share) for n in sizes if n <= most}
        rates = {n: tokens / self._time(sequences, n) for n, tokens in said.items()}
        best = max(rates, key=lambda n: rates[n])
        return guesser.guess(best) if rates[best] * self._time(sequences, 0) > 1 else []

    def plain(self, seconds: float, sequences: int = 1) -> None:
        """Record the time of a step without guesses."""
        self._times.setdefault((sequences, 0), deque(maxlen=MEASURED)).append(seconds)
        self._balance += SHARE * seconds if self._balance < 0 else 0
        self._since += 1
        if self._since % KEPT == 0:  # a busy moment shall not end a kind for good
            for (_, size), times in self._times.items():
                if size and times:
                    times.popleft()

    def guessed(self, seconds: float, guesses: Sequence[int], held: Sequence[int]) -> None:
        """Record the time of a step with guesses: guessed and accepted tokens of each sequence."""
        self.steps += 1
        self.guesses += sum(guesses)
        self.held += sum(held)
        self._last = max(held)
        plain = self._time(len(guesses), 0)
        won = (1 + sum(held) / len(held)) * plain - seconds
        self.won_s += won
        kind = len(guesses), max(guesses)
        if kind in self._times:
            self._times[kind].append(seconds)
            self._balance = min(self._balance + won, RESERVE * plain)
        else:  # the first of a kind prepares what others find
            self._times[kind] = deque(maxlen=MEASURED)

    def _time(self, sequences: int, guesses: int) -> float:
        """Of a step; of a kind that was not measured by the next larger or smaller one.

        Further guesses are taken for half as dear as those before: a kind that looks too dear would never be measured, also where a busy
        moment spoiled the only one that was.
        """
        if measured := self._times.get((sequences, guesses)):
            return median(measured)
        plain = self._time(sequences, 0) if guesses else 0.0
        known = [size for (rows, size), times in self._times.items() if rows == sequences and size and times]
        near = min(known, key=lambda size: abs(size - guesses), default=0)
        if not near:
            return plain * (1 + MORE * guesses)
        more = (self._time(sequences, near) - plain) / near
        return plain + more * (min(guesses, near) + FURTHER * max(0, guesses - near))

    def to_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            "steps": self.steps,
            "guessed_tokens": self.guesses,
            "accepted_tokens": self.held,
            "accepted_a_step": round(self.held / max(1, self.steps), 2),
            "won_s": round(self.won_s, 3),
        }
