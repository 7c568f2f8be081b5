"""A subject carries its own state through calls and steps, and every call is compared as it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from still_export.package.calls import Arrays, next_feed
from still_export.proof.answers import Question, ask
from still_export.proof.cases import Case
from still_kernels.ties import Ties

PERIOD, STEPS = 4, 11
PLACES = (2, 6, 10)


class Toy:
    """Adds up its tokens; every PERIOD tokens it takes its score or the negative of it, whichever is larger, into the sum, too.

    Args:
        fault: Added to this output of the step that ends at this length.
    """

    def __init__(self, fault: tuple[str, int] = ("", 0)) -> None:
        self.fault = fault
        self.loads: list[int] = []

    def load(self, feed: Arrays) -> None:
        self.length, self.sum = feed["past_length"], feed["past_sum"].copy()
        self.score, self.choice = feed["past_score"].copy(), feed["past_choice"].copy()
        self.loads.append(int(self.length[0]))

    def carry(self, calls: Sequence[Arrays]) -> list[Arrays]:
        self.load(calls[0])
        found = [self.step(tuple(feed["input_ids"].T[:, :, None])) for feed in calls]
        return [{**each, "logits": each["logits"][:, -1:]} for each in found]

    def seen(self) -> list[np.ndarray]:
        return []

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
        self.score = np.full((1, 1), 1e-3 if self.length[0] < 7 else 1.0)
        self.length = self.length + 1
        name, length = self.fault
        off = 1.0 if length == self.length[0] else 0.0
        if name == "sum":
            self.sum = self.sum + off
        states = {"present_sum": self.sum, "present_score": self.score, "present_choice": self.choice}
        if name == "choice":
            states["present_choice"] = self.choice * (1 - 2 * off)
        return {"logits": self.sum[:, None] + off * (name == "logits"), "present_length": self.length, **states}


def decode_case() -> Case:
    """A start of two tokens and eleven steps, answered by Toy."""
    right = Toy()
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
        if number == STEPS - 1 or feed["past_length"][0] % PERIOD == 0:
            case.feeds.append(feed)
            case.expected.append(outputs)
            places.append(number)
    case.step_logits, case.places = np.concatenate(logits, axis=1), tuple(places)
    assert case.places == PLACES
    return case


def compared(run: Any) -> list[str]:
    case = decode_case()
    answer = ask(run, Question(case.feeds[:1], case.steps, case.places), Ties())
    return [
        f"{number} {name}"
        for number, (expected, actual) in enumerate(case.pairs(answer.outputs))
        for name in expected
        if expected[name].shape != actual[name].shape or np.abs(expected[name] - actual[name]).max(initial=0) > 0.01
    ]


def test_a_right_runtime_carries_its_own_state() -> None:
    run = Toy()
    assert not compared(run) and run.loads == [0]


@pytest.mark.parametrize(
    "fault, seen",
    [
        (("logits", 4), "1 logits"),  # a plain step, before the first choice
        (("logits", 5), "2 logits"),  # the step that chooses
        (("logits", 7), "3 logits"),  # behind it
        (("sum", 4), "1 present_sum"),  # a state that the next call would not have shown
        (("sum", 8), "3 present_sum"),
        (("choice", 9), "4 present_choice"),
        (("logits", 13), "6 logits"),  # the last step
    ],
    ids=str,
)
def test_a_wrong_number_is_seen_wherever_it_is(fault: tuple[str, int], seen: str) -> None:
    assert seen in compared(Toy(fault))


def test_calls_go_on_from_the_subjects_own_state() -> None:
    case = decode_case()
    run: Any = Toy()
    calls = [case.feeds[0], *({k: x for k, x in f.items() if k in ("input_ids", "new_tokens")} for f in case.feeds[1:])]
    answer = ask(run, Question(calls), Ties())
    assert len(answer.outputs) == len(calls) and run.loads == [0]
    assert answer.outputs[0].keys() == case.expected[0].keys()
