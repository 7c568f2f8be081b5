"""Guess next tokens, and decide when that pays: n-grams of the sequence by default; costs are measured while running.

Exports copy this file into packages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

LEAST, LONGEST = 3, 8
"""Shortest and longest n-gram that is looked up. Two tokens have too many continuations; more than eight find nothing new."""
HITS = {LONGEST: 0.8, LEAST: 0.4, 0: 0.7}
"""Prior share of accepted next tokens, by how sure a guess is (length of its n-gram; 0: a model's)."""
LEARNED = 0.1
"""Weight of each new token in that share."""
MORE = 0.35
"""Prior time that each guess adds to a step, in plain steps."""
FURTHER = 0.5
"""Assumed cost of each further guess, relative to the measured cost per guess."""
MEASURED, EXPIRY = 9, 64
"""Number of steps of a kind whose median time counts (two for plain steps at the start); number of plain steps after which the times of
steps with guesses expire."""
FIRST = 4
"""Most guesses while at most half of the last ones were accepted."""
SHARE, RESERVE = 0.01, 2
"""Share of plain steps' time that guesses may waste; plain steps' time that they may lose of earlier gains."""


class Guesser(Protocol):
    """Guesses the next tokens of one sequence.

    Attributes:
        outcomes: (sureness, right) of guesses for tokens since chosen; `Speculation` reads and clears it.
    """

    outcomes: list[tuple[int, bool]]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`."""

    def sure(self) -> int | None:
        """How sure its next guess is, a key of HITS; None: there is none."""

    def guess(self, most: int) -> list[int]:
        """At most `most` guessed tokens."""


class Guessed:
    """Shared by guessers that are models: all guesses are equally sure.

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
    """A guesser by n-grams, for any sequence."""
    return Lookup(tokens)


class Lookup:
    """Guesses the tokens that followed the last occurrence of the latest n-gram.

    Args:
        tokens: Known so far.

    Attributes:
        tokens: All known tokens.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.outcomes: list[tuple[int, bool]] = []
        self.extend(tokens)
        self.outcomes.clear()  # repetitions in a prompt do not predict those in answers

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            sure, end = self._found()
            if sure is not None:
                self.outcomes.append((sure, self.tokens[end] == token))
            end = len(self.tokens)  # n-grams are known once a token follows them
            for size in (LEAST, LONGEST):
                if end >= size:
                    self._ends[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def _found(self) -> tuple[int | None, int]:
        """(length of the longest n-gram at the end that occurred before, index of the token after that occurrence)."""
        for size in (LONGEST, LEAST):
            end = self._ends.get(tuple(self.tokens[-size:]))
            if end is not None:
                return size, end
        return None, 0

    def sure(self) -> int | None:
        return self._found()[0]

    def guess(self, most: int) -> list[int]:
        """Like Guesser; at the end of the known tokens it continues with its own guesses."""
        sure, end = self._found()
        return [] if sure is None else [self.tokens[end + i % (len(self.tokens) - end)] for i in range(most)]


class Speculation:
    """Decides when a model's steps have guesses and how many, and counts what they gain.

    It measures both kinds of steps while running and picks the fastest number of guesses, a power of two, by how often equally sure guesses
    were accepted; none if a plain step is as fast.

    Args:
        most: Most guesses of a step.
        guesser: Makes one for a sequence that begins with these tokens and has this number.

    Attributes:
        steps: Steps with guesses. guesses, accepted: Their guessed and accepted tokens. won_s: Seconds saved compared with plain steps.
    """

    def __init__(self, most: int, guesser: Callable[[Sequence[int], int], Guesser] = look_up) -> None:
        self.most, self.guesser = most, guesser
        self.steps = self.guesses = self.accepted = 0
        self.won_s = 0.0
        self._hits = dict(HITS)
        self._times: dict[tuple[int, int], deque[float]] = {}  # by sequences and guesses of a step
        self._balance, self._since, self._last = 0.0, 0, 0

    def guess(self, guesser: Guesser, most: int, sequences: int = 1) -> list[int]:
        """At most `most` guesses of `guesser` for a step of `sequences` sequences; none if guessing would be slower."""
        for sure, right in guesser.outcomes:
            self._hits[sure] += LEARNED * (right - self._hits[sure])
        guesser.outcomes.clear()
        known = len(self._times.get((sequences, 0), ())) > 1
        kind = guesser.sure() if most > 0 and known and self._balance >= 0 else None
        if kind is None:
            return []
        sizes = [1 << i for i in range(self.most.bit_length())] + [self.most]
        share = min(self._hits[kind], 0.99)
        most = min(most, max(FIRST, 2 * self._last))
        expected = {n: (1 - share ** (n + 1)) / (1 - share) for n in sizes if n <= most}
        rates = {n: tokens / self._time(sequences, n) for n, tokens in expected.items()}
        best = max(rates, key=lambda n: rates[n])
        return guesser.guess(best) if rates[best] * self._time(sequences, 0) > 1 else []

    def plain(self, seconds: float, sequences: int = 1) -> None:
        """Record the time of a step without guesses."""
        self._times.setdefault((sequences, 0), deque(maxlen=MEASURED)).append(seconds)
        self._balance += SHARE * seconds if self._balance < 0 else 0
        self._since += 1
        if self._since % EXPIRY == 0:  # one slow moment must not disable a kind of steps for good
            for (_, size), times in self._times.items():
                if size and times:
                    times.popleft()

    def guessed(self, seconds: float, guesses: Sequence[int], accepted: Sequence[int]) -> None:
        """Record the time of a step with guesses: guessed and accepted tokens of each sequence."""
        self.steps += 1
        self.guesses += sum(guesses)
        self.accepted += sum(accepted)
        self._last = max(accepted)
        plain = self._time(len(guesses), 0)
        won = (1 + sum(accepted) / len(accepted)) * plain - seconds
        self.won_s += won
        kind = len(guesses), max(guesses)
        if kind in self._times:
            self._times[kind].append(seconds)
            self._balance = min(self._balance + won, RESERVE * plain)
        else:  # the first step of a kind prepares what later ones reuse
            self._times[kind] = deque(maxlen=MEASURED)

    def _time(self, sequences: int, guesses: int) -> float:
        """Time of a step; for an unmeasured kind, derived from the next larger or smaller one."""
        # Further guesses are assumed to cost half as much as those before. Otherwise a kind that looks too expensive would never be
        # measured, nor again after a slow moment.
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
        """JSON values."""
        return {
            "steps": self.steps,
            "guessed_tokens": self.guesses,
            "accepted_tokens": self.accepted,
            "accepted_a_step": round(self.accepted / max(1, self.steps), 2),
            "won_s": round(self.won_s, 3),
        }
