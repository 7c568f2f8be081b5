"""Who guesses, and whether it pays."""

from __future__ import annotations

import pytest

from still_export.runtime.speculation import LEAST, LONGEST, MEASURED, RESERVE, Lookup, Speculation

LOOP = [1, 2, 3, 4] * 20


def test_what_followed_the_latest_tokens_is_guessed() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3])
    assert (lookup.sure(), lookup.guess(3)) == (LEAST, [6, 7, 1])  # where they stood last
    assert not lookup.outcomes
    lookup.extend([6, 9])
    assert lookup.outcomes == [(LEAST, True), (LEAST, False)]
    assert (lookup.sure(), lookup.guess(3)) == (None, [])
    long = Lookup([*range(9), 50, 6, 7, 8, 60, *range(9)])
    assert (long.sure(), long.guess(2)) == (LONGEST, [50, 6])  # eight tokens say more than the latest three of them
    assert Lookup([5, 1, 2, 3, 4, 1, 2, 3]).guess(9) == [4, 1, 2, 3, 4, 1, 2, 3, 4]


def measured(most: int = 16) -> Speculation:
    speculation = Speculation(most)
    for _ in range(MEASURED):
        speculation.plain(1.0)
    return speculation


def test_nothing_is_guessed_before_a_plain_step_was_measured() -> None:
    speculation, lookup = Speculation(8), Lookup(LOOP)
    assert not speculation.guess(lookup, 8)
    speculation.plain(1.0)
    assert not speculation.guess(lookup, 8)
    speculation.plain(1.0)
    assert speculation.guess(lookup, 8)
    assert not speculation.guess(lookup, 8, sequences=2) and not speculation.guess(lookup, 0)


def answered(speculation: Speculation, lookup: Lookup, steps: int, holds: bool, more: float) -> list[int]:
    """Numbers of guesses of so many steps, each of which adds `more` to a step's time; all hold, or none."""
    sizes = []
    for _ in range(steps):
        guesses = speculation.guess(lookup, 99)
        sizes.append(len(guesses))
        if guesses:
            speculation.guessed(1 + more * len(guesses), [len(guesses)], [len(guesses) if holds else 0])
            lookup.extend([*guesses, guesses[-1] % 4 + 1] if holds else [50 + len(sizes)])
        else:
            speculation.plain(1.0)
            lookup.extend(lookup.guess(1) if holds else [99])
        if not holds:  # another n-gram that is known
            lookup.extend(LOOP[:8])
    return sizes


def test_guesses_that_hold_become_as_many_as_pay() -> None:
    speculation = measured()
    assert answered(speculation, Lookup(LOOP), 40, True, 0.1)[-1] == 16
    said = speculation.to_dict()
    assert said["steps"] == 40 and said["accepted_tokens"] == said["guessed_tokens"] > 400
    assert said["won_s"] == pytest.approx(0.9 * said["guessed_tokens"])
    assert answered(measured(), Lookup(LOOP), 40, True, 1.2)[-1] == 0  # each costs more than a plain step


def test_guesses_that_do_not_hold_end() -> None:
    speculation = measured()
    sizes = answered(speculation, Lookup(LOOP), 300, False, 0.3)
    assert sum(map(bool, sizes)) < 10 and not any(sizes[-100:])
    assert -12 < speculation.won_s < 0  # of 300 steps


def test_what_was_won_is_not_lost_again() -> None:
    speculation = measured()
    answered(speculation, Lookup(LOOP), 50, True, 0.1)
    won = speculation.won_s
    for _ in range(5):  # as likely to hold as before, for all that is known
        if guesses := speculation.guess(Lookup(LOOP), 99):
            speculation.guessed(1.0 + len(guesses), [len(guesses)], [0])
    assert won - RESERVE - 20 < speculation.won_s < won
