"""One comparison of verify: the calls, PyTorch's answers, and the errors of PyTorch's own run in the package's type."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from still_export.package.calls import Arrays
from still_export.proof.absolute import Overflow
from still_export.proof.answers import EMPTY, DecisionsByCase, Progress, Question
from still_export.proof.codes import as_numbers
from still_export.proof.constants import STORED_TIMES, TIMES
from still_export.proof.spill import room_for
from still_kernels.ties import Leads, Pairs

TINY = float(np.finfo(np.float64).tiny)
SINGLE = (np.float32, np.float16)
BLOCK = 1 << 16
"""Numbers compared at a time, so that they stay in the processor's cache."""
FEW = 8
"""Least blocks for which a thread is started."""
COMPARING = 4
"""Most threads. More of them wait for each other; sixteen are slower than one."""
MOST = 1e15
"""Within [1 / MOST, MOST], products of numbers and errors fit float32."""


@dataclass
class Case:
    """One comparison.

    Args:
        feeds, expected: Calls with fixed inputs and PyTorch's outputs, saved for polygraphy's own command.
        leads: PyTorch's leads of selected over rejected scores.
        steps: For decode: tokens [B, 1] fed one by one after the first feed; the target carries its own state.
        places: Steps at which something is chosen, and the last; the other feeds are these steps' calls.
        step_logits: PyTorch's logits after every step, [B, steps, V].
        own: `row_errors` of PyTorch's own run in the package's type, for each pair of `pairs`; then those of further calls.
        own_mean: Mean error of the own run, by output.
        experts: By layer, PyTorch's chosen experts, a mask [B, N, E].
        own_top1: (best tokens of the own run that equal the reference's, all tokens).
        unreported: By layer, tokens [B, N] with a near tie whose choice the target does not report. Their logits and states of later
            layers are not compared.
        overflow, right_overflow: Where the own run and the reference are not finite; None: nowhere.
        amplified: Errors as of `own` that further own runs made, or that disturbed inputs let expect; empty: there was no such run.
    """

    name: str
    feeds: list[Arrays]
    expected: list[Arrays]
    leads: Leads = field(default_factory=dict)
    steps: tuple[np.ndarray, ...] = ()
    places: tuple[int, ...] = ()
    step_logits: np.ndarray | None = None
    own: list[Arrays] = field(default_factory=list)
    own_mean: dict[str, float] = field(default_factory=dict)
    own_top1: tuple[int, int] = (0, 0)
    experts: dict[int, np.ndarray] = field(default_factory=dict)
    unreported: Mapping[int, np.ndarray] = field(default_factory=dict)
    overflow: Overflow | None = None
    right_overflow: Overflow | None = None
    amplified: list[Arrays] = field(default_factory=list)

    @cached_property
    def largest(self) -> dict[str, float]:
        """Largest absolute number of PyTorch's answers, by output."""
        found: dict[str, float] = {}
        for expected in self.expected:
            for name, values in as_numbers(expected).items():
                size = max(values.max(initial=0), -values.min(initial=0))
                if not np.isfinite(size):
                    size = np.abs(values).max(initial=0, where=np.isfinite(values))
                found[name] = max(found.get(name, 0.0), float(size))
        return found

    def forget(self) -> None:
        """Drop the calls, except what bounds and reports read."""
        _ = self.largest
        self.feeds, self.expected, self.step_logits = [], [], None

    def pairs(self, outputs: Sequence[Arrays]) -> Pairs:
        """Pairs (PyTorch's outputs, the subject's) for each call, then for each group of steps (`Answer.outputs`). 8-bit states are
        decoded."""
        left = iter(outputs)
        if not self.steps:
            return [fixed_pair(feed, right, next(left)) for feed, right in zip(self.feeds, self.expected, strict=True)]
        pairs, done = [fixed_pair(self.feeds[0], self.expected[0], next(left))], 0
        for place, feed, expected in zip(self.places, self.feeds[1:], self.expected[1:], strict=True):
            if place > done:
                pairs.append((self.before(place, done, feed), as_numbers(next(left))))
            pairs.append((as_numbers(expected), as_numbers(next(left))))
            done = place + 1
        return pairs

    def add(self, known: Case) -> None:
        """Merge further results of the same case: more states of its calls, or their logits."""
        for arrays, more in zip((*self.feeds, *self.expected), (*known.feeds, *known.expected), strict=True):
            arrays.update(more)
        self.step_logits = known.step_logits

    def amplifying(self, disturbed: Case) -> Case:
        """This case, whose rows may err as many times the usual own error as a disturbance of the input grows in them."""
        both = zip(self.own, self.amplified or self.own, disturbed.own, strict=True)
        rows = [{n: np.fmax(old[n], _grown(x, more[n])) for n, x in each.items()} for each, old, more in both]
        return replace(self, amplified=rows)

    def storing(self, other: Case) -> Case:
        """This case, whose rows may err STORED_TIMES as far as any row of the output in the same call of another own run."""
        both = zip(self.amplified or self.own, other.own, strict=True)
        rows = [{n: np.fmax(x, _stored_times(more[n])) for n, x in each.items()} for each, more in both]
        return replace(self, amplified=rows)

    def same_experts(self, seen: Sequence[np.ndarray]) -> bool:
        """Whether PyTorch chose the same experts [B, N, k] as the runtime, in each layer that reports them."""
        for (_, mask), chosen in zip(sorted(self.experts.items()), seen, strict=False):
            count = min(mask.shape[1], chosen.shape[1])
            mask, chosen = mask[:, :count], chosen[:, :count]
            reported = chosen >= 0
            there = np.take_along_axis(mask, np.clip(chosen, 0, mask.shape[2] - 1), -1) & (chosen < mask.shape[2])
            fewer = reported.any(-1) & (reported.sum(-1) < mask.sum(-1))
            if not (there | ~reported).all() or fewer.any():
                return False
        return True

    def open_tokens(self, below: float = math.inf) -> np.ndarray:
        """Tokens [B, N] that are `unreported` in any layer before `below`; N is 0 if there are none."""
        found = [tokens for layer, tokens in self.unreported.items() if layer < below]
        return np.asarray(np.any(found, axis=0)) if found else np.zeros((1, 0), bool)

    def open_rows(self, expected: Arrays) -> np.ndarray:
        """Rows [B, T] of a call's logits that belong to `unreported` tokens."""
        real, tokens = np.any(expected["logits"] != 0, axis=-1), self.open_tokens()
        places = expected["present_length"][:, None] - real.sum(1, keepdims=True) + np.arange(real.shape[1])
        within = real & (places >= 0) & (places < tokens.shape[1])
        chosen = np.take_along_axis(tokens, np.where(within, places, 0), 1) if tokens.size else within & False
        return np.asarray(within & chosen)

    def before(self, place: int, done: int, feed: Arrays) -> Arrays:
        """PyTorch's outputs of the steps from `done` up to `place`; `feed` is the call at `place`."""
        states = {name.replace("past_", "present_", 1): x for name, x in feed.items() if name.startswith("past_")}
        return as_numbers(states if self.step_logits is None else {**states, "logits": self.step_logits[:, done:place]})


class CaseSource(Protocol):
    """Source of cases: PyTorch next to the target, or a file of recorded answers. `uses_decisions`: PyTorch can use a runtime's choices."""

    count: int
    uses_decisions: bool
    progress: Progress

    def begin(self, number: int) -> Question:
        """Draw the prompts of a case, before PyTorch answers."""

    def draw(self, numbers: Sequence[int], decisions: DecisionsByCase = EMPTY) -> list[Case]:
        """The cases of these numbers (less than `count`), with the prompts of `begin`. PyTorch uses the choices in `decisions`."""


def fixed_pair(feed: Arrays, expected: Arrays, actual: Arrays) -> tuple[Arrays, Arrays]:
    """PyTorch's outputs of `feed` and another's, with padding set to zero."""
    counts = feed["new_tokens"]
    first, second = (as_numbers({**o, "logits": _without_padding(o["logits"], counts)}) for o in (expected, actual))
    return first, second


def _without_padding(logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`logits` [B, 1 or T, V] with zeros in rows without new tokens."""
    real = np.minimum(counts, logits.shape[1])
    if (real == logits.shape[1]).all():
        return logits
    found = room_for(logits.shape, logits.dtype)
    for row, count in enumerate(real):
        found[row, :count] = logits[row, :count]
    return found


def row_errors(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Two errors of each row of an output, [2, ...] of [..., D].

    A row is a token's logits, a slot of a head, or a feature of a linear state; counts [B] are rows of one number. The first error is the
    largest of the row's numbers. The second is the component along the row, which shows a wrong factor. NaN: both sides are all zeros.
    Infinity: one side is not finite.
    """
    return errors_of(expected, actual)[0]


def errors_of(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, float]:
    """(`row_errors`, the sum of the errors of all numbers)."""
    if expected.ndim < 2:
        expected, actual = expected[..., None], actual[..., None]
    rows, width = expected.shape[:-1], expected.shape[-1]
    if are_zeros(expected) and are_zeros(actual):
        return np.full((2, *rows), np.nan), 0.0
    # The difference of two float32 numbers that are near each other is exact.
    wide: Any = np.float32 if expected.dtype in SINGLE and actual.dtype in SINGLE else np.float64
    sides = [x.reshape(math.prod(rows), width) for x in (expected, actual)]
    found = np.full((2, math.prod(rows)), np.nan)
    size = max(1, BLOCK // max(width, 1))

    def measure(start: int) -> float:
        part = slice(start, start + size)
        a: Any
        b: Any
        a, b = (x[part].astype(wide, copy=False) for x in sides)
        largest = np.maximum(a.max(-1, initial=0), -a.min(-1, initial=0))
        if not (largest.max(initial=0) < MOST and largest.min(initial=1, where=largest > 0) > 1 / MOST):
            a, b = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            error = b - a
        if not np.isfinite(error).all():
            error = np.copysign(distance(a, b), error)
            a = np.where(np.isfinite(a), a, 0)
        with np.errstate(invalid="ignore"):
            along = np.abs(np.einsum("nd,nd->n", a, error))
            along = along / np.maximum(np.sqrt(np.einsum("nd,nd->n", a, a)), np.finfo(a.dtype).tiny)
        error = np.abs(error, out=error)
        top = error.max(-1, initial=0)
        valid = (largest > 0) | ~(top == 0)
        found[:, part] = np.where(valid, np.nan_to_num([top, along], nan=np.inf, posinf=np.inf), np.nan)
        return float(error.sum(-1).sum(dtype=np.float64))

    total = sum(_each_block(measure, range(0, found.shape[1], size)))
    return found.reshape(2, *rows), total


def _stored_times(errors: np.ndarray) -> np.ndarray:
    """Errors [2, ...] of a call's rows, of which TIMES are allowed, where STORED_TIMES of the largest of `errors` are."""
    known = np.isfinite(errors)
    most = np.max(errors, axis=tuple(range(1, errors.ndim)), keepdims=True, initial=0, where=known)
    return np.asarray(np.where(known, most, np.nan) * (STORED_TIMES / TIMES), np.float32)


def _grown(own: np.ndarray, disturbed: np.ndarray) -> np.ndarray:
    """The usual of `own` errors [2, ...], times what each of `disturbed` is of their usual one."""
    known = np.isfinite(own).all(0) & np.isfinite(disturbed).all(0)
    if not known.any():
        return own
    usual, of = (np.median(x[:, known].astype(np.float64), 1) for x in (own, disturbed))
    factors = np.divide(usual, of, out=np.zeros(2), where=of > 0).reshape(2, *[1] * (own.ndim - 1))
    return np.asarray(np.where(np.isfinite(disturbed), disturbed * factors, own), own.dtype)


def are_zeros(array: np.ndarray) -> bool:
    """Whether the array is one zero, broadcast."""
    return array.size > 0 and not any(array.strides) and not array.flat[0]


def _each_block(measure: Callable[[int], Any], starts: range) -> list[Any]:
    """Apply `measure` to each block, in threads if there are many."""
    if len(starts) <= FEW:
        return [*map(measure, starts)]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, COMPARING)) as pool:
        return [*pool.map(measure, starts)]


def distance(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Absolute difference in float64; 0 where both are the same infinity (the score of position 0 is infinite)."""
    with np.errstate(invalid="ignore"):
        error = np.abs(np.subtract(expected, actual, dtype=np.float64))
    return np.where(expected == actual, 0, error) if np.isnan(error).any() else np.asarray(error)


def same_best(expected: Arrays, actual: Arrays) -> np.ndarray:
    """Where both have the same likeliest token, over sequences with new tokens."""
    real = np.any(expected["logits"] != 0, axis=-1)
    return (expected["logits"].argmax(-1) == actual["logits"].argmax(-1))[real]
