"""One comparison of verify, what PyTorch answered, and how far its own half precision run is off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from still_export.mixers.ties import Excuses, Leads, Pairs
from still_export.package.calls import Arrays, next_feed, without_padding
from still_export.proof.codes import as_numbers

RARE = 0.99
"""The part of PyTorch's own rounding errors that is called usual; the error at its end is what an engine is held to."""


ROUNDINGS = 64
"""Half units of float32's last place by which a sum may differ: as many as a chunk has terms. Half precision's unit is 8,192 of these."""


class Noise(NamedTuple):
    """Errors of PyTorch's half precision run on one output, where either run's number is not zero.

    `usual` is the bound that all but a hundredth of them keep (RARE), `mean` and `largest` are over all, `part` is the largest
    median of a part (`part_medians`). `sums` is what sums in float32 of the largest number may differ by in another order (ROUNDINGS):
    where half precision changes nothing, as in a sum of constants, the others are 0.
    """

    usual: float
    mean: float
    largest: float
    part: float = 0.0
    sums: float = 0.0


@dataclass
class Case:
    """One comparison.

    Args:
        name: For the table.
        feeds, expected: Calls with fixed inputs and PyTorch's outputs, saved for polygraphy's own command.
        find_leads: Computes PyTorch's lead of selected over rejected scores.
        steps: For decode: the tokens [B, 1] that follow the first feed one by one; the target carries its own state.
        places: Numbers of the steps whose calls the other feeds are: those at which something is chosen, and the last.
        step_logits: PyTorch's logits after every step, [B, steps, V].
        noise: Of PyTorch's own half precision run, by output; empty for a package in float32.
        own_top1: That run's best tokens that are float32's too, and all.
    """

    name: str
    feeds: list[Arrays]
    expected: list[Arrays]
    find_leads: Callable[[], Leads]
    steps: tuple[np.ndarray, ...] = ()
    places: tuple[int, ...] = ()
    step_logits: np.ndarray | None = None
    noise: dict[str, Noise] = field(default_factory=dict)
    own_top1: tuple[int, int] = (0, 0)

    @cached_property
    def leads(self) -> Leads:
        """PyTorch's lead of selected over rejected scores."""
        return self.find_leads()

    def pairs(self, run: Steps, excuses: Excuses) -> tuple[Pairs, Pairs]:
        """PyTorch's and the target's outputs: of each call, or along the steps; and those of steps in which it chose otherwise. Rows in
        8 bits are numbers.

        Everything behind another choice differs, though either may be right. So the steps go on from PyTorch's state there: the call
        is repeated with PyTorch's scores, which leave no choice, and compared like every other. What was chosen first is judged by
        itself.
        """
        if not self.steps:
            calls = zip(self.feeds, self.expected, strict=True)
            return [fixed_pair(feed, expected, run.infer(feed)) for feed, expected in calls], []
        pairs, turned = [fixed_pair(self.feeds[0], self.expected[0], run.infer(self.feeds[0]))], []
        if not excuses.alike(*pairs[0]):
            run.load(next_feed(self.expected[0], self.steps[0]))
        done = 0
        for place, feed, expected in zip(self.places, self.feeds[1:], self.expected[1:], strict=True):
            if place > done:
                found = as_numbers(run.step(self.steps[done:place]))
                pairs.append((self.before(place, done, feed), found))
            found, expected = as_numbers(run.step(self.steps[place : place + 1])), as_numbers(expected)
            if not excuses.alike(expected, found):
                turned.append((expected, found))
                found = as_numbers(run.infer(feed))
            pairs.append((expected, found))
            done = place + 1
        return pairs, turned

    def before(self, place: int, done: int, feed: Arrays) -> Arrays:
        """PyTorch's outputs after the steps from `done` up to `place`, whose call `feed` is."""
        assert self.step_logits is not None
        held = {name.replace("past_", "present_", 1): x for name, x in feed.items() if name.startswith("past_")}
        return as_numbers({**held, "logits": self.step_logits[:, done:place]})


class Steps(Protocol):
    """What carries a state from call to call."""

    def load(self, feed: Arrays) -> None:
        """Take the state that `feed` gives."""

    def infer(self, feed: Arrays) -> Arrays:
        """Outputs of one call whose state is given."""

    def step(self, tokens: tuple[np.ndarray, ...]) -> Arrays:
        """Outputs after `tokens` [B, 1], fed one by one, with the logits of all of them."""


class CaseSource(Protocol):
    """Where cases come from: PyTorch beside the target, or a file that PyTorch filled on another machine."""

    count: int

    def draw(self, numbers: Sequence[int]) -> list[Case]:
        """The cases of these numbers, below `count`; asked again, with other prompts where it can."""


def fixed_pair(feed: Arrays, expected: Arrays, actual: Arrays) -> tuple[Arrays, Arrays]:
    """PyTorch's outputs of `feed` and another's, without what stands behind padding."""
    counts = feed["new_tokens"]
    first, second = (as_numbers({**o, "logits": without_padding(o["logits"], counts)}) for o in (expected, actual))
    return first, second


def noise_of(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Noise:
    """Errors of the second arrays beside the first ones, where either is not zero; equal infinities do not differ."""
    found = []
    for expected, actual in pairs:
        error = distance(expected, actual)
        found.append(error[(expected != 0) | (actual != 0)].ravel())
    errors = np.concatenate(found)
    if not errors.size:
        return Noise(0.0, 0.0, 0.0)
    usual = float(np.quantile(errors, RARE, method="higher"))
    worst = max(max(part_medians(*pair), default=0.0) for pair in pairs)
    sizes = np.concatenate([np.abs(expected[np.isfinite(expected)], dtype=np.float64) for expected, _ in pairs])
    sums = ROUNDINGS * float(np.finfo(np.float32).eps) / 2 * float(sizes.max(initial=0.0))
    return Noise(usual, float(errors.mean()), float(errors.max()), worst, sums)


def part_medians(expected: np.ndarray, actual: np.ndarray) -> list[float]:
    """Median error of each part of an output: each row's logits, each head of each row of a state.

    A whole output's median would not see one wrong row of a batch, nor a wrong slot among many that are still zero: only numbers count
    that are not zero on both sides.
    """
    if not expected.size:
        return []
    count = math.prod(expected.shape[:2])
    error, counted = distance(expected, actual), (expected != 0) | (actual != 0)
    parts = zip(error.reshape(count, -1), counted.reshape(count, -1), strict=True)
    return [float(np.median(part[mask])) for part, mask in parts if mask.any()]


def distance(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Absolute difference in float64; 0 where both are the same infinity (position 0 has an infinite score)."""
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    same = a == b
    return np.abs(np.where(same, 0, a) - np.where(same, 0, b))


def same_best(expected: Arrays, actual: Arrays) -> np.ndarray:
    """Where both find the same token the likeliest, over the rows that brought tokens."""
    real = np.any(expected["logits"] != 0, axis=-1)
    return (expected["logits"].argmax(-1) == actual["logits"].argmax(-1))[real]
