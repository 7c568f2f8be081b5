"""Choosing the next token; the error class of all runners."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from still_export.package.refusals import RunError as RunError

NO_TOKEN = -1
"""Returned by `likeliest` if the largest logit is not finite."""
INFINITY = 0x7C00
"""Bits of float16's infinity."""
LIKELY = 64
"""Tokens that are searched first for the mass top_p."""


def likeliest(logits: np.ndarray) -> np.ndarray:
    """The first of the likeliest tokens [...] by logits [..., V]; where the largest is a zero of both signs, the first without one.
    NO_TOKEN where a logit is NaN or the largest is infinite: the model overflowed.

    NumPy compares float16 one by one, 0.1 ms and more for a vocabulary: a step's time on a GPU. As integers of the same order they are
    compared as vectors.
    """
    if logits.dtype != np.float16:
        found = logits.argmax(-1)  # of the first NaN where there is one
        return np.where(np.isfinite(np.take_along_axis(logits, found[..., None], -1)[..., 0]), found, NO_TOKEN)
    bits = logits.view(np.int16)
    order = bits ^ (bits >> 15 & 0x7FFF)
    found = order.argmax(-1)
    largest = np.take_along_axis(order, found[..., None], -1)[..., 0]
    finite = (largest < INFINITY) & (largest > ~INFINITY) & (order.min(-1) >= ~INFINITY)  # NaN of both signs lie beyond
    return np.where(finite, found, NO_TOKEN)


def checked_token(token: int) -> int:
    """A token of `likeliest`.

    Raises:
        RunError: It is NO_TOKEN.
    """
    if token < 0:
        raise NotFiniteError()
    return token


class NotFiniteError(RunError):
    """The logits of one request are not finite."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers (NaN or infinity), so there is no next token: it overflows on this input, or its "
            "weights are damaged. Export it again with --dtype float32 or bfloat16; `still-export verify` names the layer."
        )


@dataclasses.dataclass
class Sampling:
    """How the next token is chosen: temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens, top_p 0 the likeliest one; seed -1
    differs each time."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 <= self.top_p <= 1 or self.seed < -1:
            raise RunError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, seed={self.seed}: "
                "temperature and top_k must not be negative, nor seed but for -1 (random); top_p lies in [0, 1]."
            )
        self.random = np.random.default_rng(None if self.seed == -1 else self.seed)

    def choose(self, logits: np.ndarray) -> int:
        """Next token from logits [V].

        Raises:
            NotFiniteError: A logit is NaN, or the largest is infinite.
        """
        if self.temperature == 0:
            return checked_token(int(likeliest(logits)))
        largest = float(logits.max())  # NaN if one is
        if not math.isfinite(largest):
            raise NotFiniteError()
        with np.errstate(over="ignore"):  # the smallest temperatures give -inf and weight 0
            weight = np.exp((logits.astype(np.float64) - largest) / self.temperature)
        tokens = self._candidates(weight)
        mass = np.cumsum(weight if tokens is None else weight[tokens])
        place = int(np.searchsorted(mass / mass[-1], self.random.random(), side="right"))
        return place if tokens is None else int(tokens[place])

    def _candidates(self, weight: np.ndarray) -> np.ndarray | None:
        """The tokens to sample from, likeliest first, found by sorting as few as possible; None: all."""
        if not self.top_k and self.top_p == 1:
            return None
        count = min(self.top_k or LIKELY, weight.size)
        while True:
            least = np.partition(weight, -count)[-count]
            tokens = np.flatnonzero(weight >= least)  # with ties of the last, in the order of ids
            tokens = tokens[np.argsort(-weight[tokens], kind="stable")][:count]
            mass = np.cumsum(weight[tokens])
            # The smallest set whose mass reaches top_p: a token stays while the mass before it is below.
            nucleus = mass - weight[tokens] < self.top_p * (mass[-1] if self.top_k else weight.sum())
            nucleus[0] = True
            if self.top_k or count == weight.size or not nucleus[-1]:
                return tokens[nucleus]
            count = min(8 * count, weight.size)
