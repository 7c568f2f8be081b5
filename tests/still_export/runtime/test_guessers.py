"""Who guesses, and whether it pays."""

from __future__ import annotations

import pytest

from still_export.runtime.speculation import DOUBT, FIRST, LEAST, LONGEST, MEASURED, Lookup, Speculation


def test_what_followed_the_latest_tokens_is_guessed() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3])
    assert lookup.guess(3, LEAST) == [6, 7, 1]  # where they stood last
    assert lookup.guess(3, LONGEST) == []
    lookup.extend([9])
    assert lookup.guess(3, LEAST) == []
    long = Lookup([*range(9), 50, 6, 7, 8, 60, *range(9)])
    assert long.guess(2, LEAST) == [50, 6]  # eight tokens say more than the latest three of them
    assert Lookup([5, 1, 2, 3, 4, 1, 2, 3]).guess(9, LEAST) == [4, 1, 2, 3, 4, 1, 2, 3, 4]


def measured(most: int = 16, plain: float = 1.0) -> Speculation:
    speculation = Speculation(most)
    for _ in range(MEASURED):
        speculation.plain(plain)
    return speculation


def test_nothing_is_guessed_before_a_plain_step_was_measured() -> None:
    speculation, lookup = Speculation(8), Lookup([1] * 9)
    assert not speculation.guess(lookup, 8)
    speculation.plain(1.0)
    assert not speculation.guess(lookup, 8)
    speculation.plain(1.0)
    assert (
        speculation.guess(lookup, 8)
        and not speculation.guess(lookup, 8, sequences=2)
        and not speculation.guess(lookup, 0)
    )


def test_guesses_that_hold_become_more_and_others_fewer() -> None:
    speculation, lookup = measured(), Lookup([1, 2, 3, 4] * 20)
    for expected in (FIRST, 2 * FIRST, 16, 16):
        guesses = speculation.guess(lookup, 99)
        assert len(guesses) == expected
        speculation.guessed(1.5, [expected], [expected])
    speculation.guessed(1.5, [16], [2])
    assert len(speculation.guess(lookup, 99)) == 3 and len(speculation.guess(lookup, 2)) == 2
    said = speculation.to_dict()
    assert (said["steps"], said["accepted_tokens"]) == (5, FIRST + 2 * FIRST + 34)
    assert said["won_s"] == pytest.approx(1 + FIRST + 1 + 2 * FIRST + 2 * 17 + 3 - 5 * 1.5)


def test_guesses_that_lose_end_and_are_tried_again() -> None:
    speculation, lookup = measured(), Lookup([1, 2, 3, 4] * 20)
    steps = 0
    while speculation.guess(lookup, 99):
        speculation.guessed(3.0, [4], [0])
        steps += 1
    assert 1 < steps <= DOUBT + 2
    plain = 0
    while not speculation.guess(lookup, 99):
        speculation.plain(1.0)
        plain += 1
    assert plain > 20  # what is lost is a small part of the time


def test_what_was_won_is_not_lost_again() -> None:
    speculation, lookup = measured(), Lookup([1, 2, 3, 4] * 20)
    for _ in range(50):
        speculation.guessed(1.5, [16], [16])
    before, steps = speculation.won_s, 0
    while speculation.guess(lookup, 99):
        speculation.guessed(3.0, [4], [0])
        steps += 1
    assert steps < 8 and speculation.won_s > before / 2
