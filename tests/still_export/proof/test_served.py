"""The judge of a serving engine, by arrays alone: what was compared must be right, what was not is counted and named."""

from collections.abc import Sequence

import numpy as np
import pytest

from still_export.proof.served import Answer, Bound, Load, LoadReport, Request, Served, judge

COUNT = 8
STRICT, HALF = Bound(0.05, 0.1), Bound(0.05, 0.1, median=True)


def asked(
    errors: Sequence[Sequence[float]],
    behind: Sequence[float] = (0.0,) * COUNT,
    bound: Bound = STRICT,
    sure: int = COUNT,
    rounded: bool = False,
    came: int = COUNT,
) -> LoadReport:
    """Answers whose log-probabilities are off by `errors`, and whose tokens lie `behind` PyTorch's likeliest."""
    chosen = np.full(COUNT, -1.0)
    answers = [Answer(tuple(range(came)), tuple((chosen + row)[:came])) for row in np.array(errors)]
    requests = [Request((1, 2, 3), COUNT, 0) for _ in answers]
    expected = [np.stack([chosen, chosen + np.array(behind)])[:, :came] for _ in answers]
    served = Served(answers, 0)
    return judge(Load("load", 64, 4, 100), requests, served, expected, bound, lambda _: sure, lambda _: rounded)


def off(place: int, by: float = 0.2) -> list[float]:
    return [by * (number == place) for number in range(COUNT)]


def test_right_answers_pass_and_a_wrong_token_fails() -> None:
    assert asked([off(0, 0.01)] * 3).passed
    found = asked([off(0, 0), off(5)])
    assert not found.passed and found.wrong[0].startswith("request 1 ") and not found.not_asked
    assert not asked([off(0, 0)], behind=off(3)).passed
    assert not asked([off(0, 0)], came=COUNT - 1).passed


@pytest.mark.parametrize(("place", "passed"), [(5, True), (4, True), (3, False), (0, False)])
def test_tokens_behind_a_near_tie_alone_are_not_compared(place: int, passed: bool) -> None:
    """Four come before it."""
    found = asked([off(place)], sure=4)
    assert found.passed == passed and found.open_tokens == COUNT - 4
    assert "4 of 8 tokens" in found.not_asked[0]


def test_where_nothing_can_be_compared_nothing_is_proven() -> None:
    assert not asked([off(0)] * 3, sure=0).passed and asked([off(0), off(0, 0)], sure=0).passed


def test_no_share_of_wrong_requests_is_excused() -> None:
    right = [off(0, 0)] * 199
    assert asked(right).passed and not asked([*right, off(2)]).passed


def test_as_many_answers_of_another_rounding_as_there_are_pass_and_are_counted() -> None:
    many = [[0.2] * COUNT] * 5
    found = asked(many, bound=HALF, rounded=True)
    assert found.passed and found.turned == 5
    assert len(asked(many, bound=HALF).wrong) == 5 and asked([off(0), off(1)], bound=HALF).passed
