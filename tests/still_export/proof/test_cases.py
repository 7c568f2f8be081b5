"""Steps of a case go on from PyTorch's state where a near tie was chosen otherwise, and every call is compared as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from still_export.package.calls import Arrays, next_feed
from still_export.proof.cases import Case
from still_kernels.ties import Ties

PERIOD, STEPS = 4, 11
PLACES = (2, 6, 10)


class Toy:
    """Adds up its tokens; every PERIOD tokens it takes its score or the negative of it, whichever is larger, into the sum, too.

    Args:
        nudge: What the scores are off by.
        fault: Added to this output of the step that ends at this length.
    """

    def __init__(self, nudge: float = 0.0, fault: tuple[str, int] = ("", 0)) -> None:
        self.nudge, self.fault = nudge, fault
        self.loads: list[int] = []

    def load(self, feed: Arrays) -> None:
        self.length, self.sum = feed["past_length"], feed["past_sum"].copy()
        self.score, self.choice = feed["past_score"].copy(), feed["past_choice"].copy()
        self.loads.append(int(self.length[0]))

    def infer(self, feed: Arrays) -> Arrays:
        self.load(feed)
        return self.step(tuple(feed["input_ids"].T[:, :, None]))

    def step(self, tokens: tuple[np.ndarray, ...]) -> Arrays:
        found = [self._one(token) for token in tokens]
        return {**found[-1], "logits": np.concatenate([f["logits"] for f in found], axis=1)}

    def _one(self, token: np.ndarray) -> Arrays:
        if self.length[0] % PERIOD == 0:
            self.choice = np.where(self.score > 0, 1.0, -1.0)
            self.sum = self.sum + 10 * self.choice
        self.sum = self.sum + token
        self.score = np.full((1, 1), 1e-3 if self.length[0] < 7 else 1.0) + self.nudge
        self.length = self.length + 1
        name, length = self.fault
        off = 1.0 if length == self.length[0] else 0.0
        if name == "sum":
            self.sum = self.sum + off
        states = {"present_sum": self.sum, "present_score": self.score, "present_choice": self.choice}
        if name == "choice":
            states["present_choice"] = self.choice * (1 - 2 * off)
        return {"logits": self.sum[:, None] + off * (name == "logits"), "present_length": self.length, **states}


class Chosen:
    """The choices of Toy."""

    score = "score"

    def alike(self, expected: Arrays, actual: Arrays) -> bool:
        return bool(np.array_equal(expected["present_choice"], actual["present_choice"]))

    def chooses(self, lengths: np.ndarray) -> bool:
        return bool(np.any(lengths % PERIOD == 0))


def decode_case() -> Case:
    """A start of two tokens and eleven steps, answered by Toy."""
    right, ties = Toy(), Ties([Chosen()])  # type: ignore[list-item]
    empty = {f"past_{name}": np.zeros((1, 1)) for name in ("sum", "score", "choice")}
    start = {**empty, "past_length": np.zeros(1, int), "input_ids": np.array([[3, 5]]), "new_tokens": np.array([2])}
    outputs = right.infer(start)
    case = Case("steps", [start], [{**outputs, "logits": outputs["logits"][:, -1:]}])
    case.steps = tuple(np.array([[i]]) for i in range(STEPS))
    logits, places = [], []
    for number, token in enumerate(case.steps):
        feed = next_feed(outputs, token)
        outputs = right.infer(feed)
        logits.append(outputs["logits"])
        if number == STEPS - 1 or ties.chooses(feed["past_length"]):
            case.feeds.append(feed)
            case.expected.append(outputs)
            places.append(number)
    case.step_logits, case.places = np.concatenate(logits, axis=1), tuple(places)
    assert case.places == PLACES
    return case


def compared(run: Toy) -> tuple[list[str], int]:
    """Outputs that differ by more than the scores' own error, with the call's number, and how many choices were turned."""

    class Last(Toy):
        def infer(self, feed: Arrays) -> Arrays:
            outputs = super().infer(feed)
            return {**outputs, "logits": outputs["logits"][:, -1:]}

    run.__class__ = Last
    pairs, turned = decode_case().pairs(run, Ties([Chosen()]))  # type: ignore[list-item]
    wrong = [
        f"{number} {name}"
        for number, (expected, actual) in enumerate(pairs)
        for name in expected
        if expected[name].shape != actual[name].shape or np.abs(expected[name] - actual[name]).max(initial=0) > 0.01
    ]
    return wrong, len(turned)


def test_a_right_runtime_carries_its_own_state() -> None:
    run = Toy()
    assert compared(run) == ([], 0)
    assert run.loads == [0]


def test_behind_a_near_tie_steps_go_on_from_pytorchs_state() -> None:
    run = Toy(nudge=-2e-3)  # turns the choice at 4, not the one at 8
    wrong, turned = compared(run)
    assert (wrong, turned) == ([], 1)
    assert run.loads == [0, 4]


@pytest.mark.parametrize("nudge", [0.0, -2e-3], ids=["alike", "turned"])
@pytest.mark.parametrize(
    "fault, seen",
    [
        (("logits", 4), "1 logits"),  # a plain step, before the first choice
        (("logits", 5), "2 logits"),  # the step that chooses, repeated where it chose otherwise
        (("logits", 7), "3 logits"),  # behind it
        (("sum", 4), "1 present_sum"),  # a state that the next call would not have shown
        (("sum", 8), "3 present_sum"),
        (("logits", 13), "6 logits"),  # the last step
    ],
    ids=str,
)
def test_a_wrong_number_is_seen_wherever_it_is(nudge: float, fault: tuple[str, int], seen: str) -> None:
    wrong, _ = compared(Toy(nudge, fault))
    assert seen in wrong


def test_a_choice_that_scores_do_not_explain_is_kept_for_judgement() -> None:
    wrong, turned = compared(Toy(fault=("choice", 9)))
    assert turned == 1 and any("present_choice" in name for name in wrong), "repeating the step does not hide it"


def test_calls_with_fixed_inputs_are_asked_one_by_one() -> None:
    case: Any = decode_case()
    case = Case("calls", case.feeds, case.expected)
    run = Toy()
    pairs, turned = case.pairs(run, Ties())
    assert len(pairs) == len(case.feeds) == len(run.loads) and not turned
