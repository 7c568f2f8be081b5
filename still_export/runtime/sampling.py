"""Choosing the next token; the error class of all runners."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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


class GrammarError(RunError):
    """No answer follows the grammar that the request asks for."""


class Grammar(Protocol):
    """Limits the next token to those with which an answer can still follow a grammar."""

    ended: bool
    """The answer is complete."""

    def allowed(self) -> np.ndarray: ...  # bool [V]
    def take(self, token: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities by the model's logits, before any setting: of the chosen token, and of the likeliest ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def setting(default: Any, text: str, **limits: float) -> Any:
    """A field of Sampling that users set, with the help of its flag, and its `least` and `most`."""
    return dataclasses.field(default=default, metadata={"help": text, **limits})


@dataclasses.dataclass
class Sampling:
    """How the next token is chosen. The settings are those of the command line, of Python, of requests and of packages' programs.

    Args:
        logit_bias: Added to the logits of these tokens.
        logprobs: Number of likeliest tokens in `found`; None: log-probabilities are not computed.
        grammar: Of the answer.

    Attributes:
        found: Log-probabilities of the chosen tokens, if `logprobs` is set.
    """

    temperature: float = setting(0.0, "0 = greedy.", least=0)
    top_k: int = setting(0, "0 = all.", least=0)
    top_p: float = setting(1.0, "1 = all.", least=0, most=1)
    seed: int = setting(0, "Of the sampling; -1 = another each time.", least=-1)
    min_p: float = setting(
        0.0, "Least probability of a token, as a part of the likeliest one's; 0 = all.", least=0, most=1
    )
    presence_penalty: float = setting(0.0, "Taken from the logits of tokens of the answer so far.", least=-2, most=2)
    frequency_penalty: float = setting(0.0, "The same for each time that they occur.", least=-2, most=2)
    repetition_penalty: float = setting(
        1.0,
        "Divides positive logits of tokens of prompt and answer, and multiplies negative ones; 1 = none.",
        least=0.01,
        most=100,
    )
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for entry in SETTINGS:
            value, least, most = getattr(self, entry.name), entry.metadata["least"], entry.metadata.get("most")
            if not least <= value < math.inf or (most is not None and value > most):
                limits = f"at least {least:g}" if most is None else f"{least:g} to {most:g}"
                raise RunError(f"{entry.name}={value}: it must be a number, {limits}.")
        self.random = np.random.default_rng(None if self.seed == -1 else self.seed)
        self.found: list[TokenLogprobs] = []
        self.begin(())

    @property
    def greedy(self) -> bool:
        """The next token is the likeliest one, by the model's logits alone."""
        return self.temperature == 0 and self.logprobs is None and self.grammar is None and not self._changes

    @property
    def ended(self) -> bool:
        """The answer is complete by its grammar."""
        return self.grammar is not None and self.grammar.ended

    @property
    def _changes(self) -> bool:
        """Whether settings change logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start an answer after `prompt`."""
        self._prompt = (
            np.unique(np.asarray(prompt, np.int64)) if self.repetition_penalty != 1 else np.zeros(0, np.int64)
        )
        self._counts: dict[int, int] = {}

    def choose(self, logits: np.ndarray) -> int:
        """Next token from logits [V].

        Raises:
            NotFiniteError: A logit is NaN, or the largest is infinite.
        """
        if self.greedy:
            return checked_token(int(likeliest(logits)))
        if not math.isfinite(float(logits.max())):  # NaN if one is
            raise NotFiniteError()
        token = self._chosen(self._changed(logits))
        self._counts[token] = self._counts.get(token, 0) + 1
        if self.grammar is not None:
            self.grammar.take(token)
        if self.logprobs is not None:
            self.found.append(_logprobs(logits, token, self.logprobs))
        return token

    def _changed(self, logits: np.ndarray) -> np.ndarray:
        """Logits after penalties, bias and grammar."""
        if not self._changes and self.grammar is None:
            return logits
        logits = logits.astype(np.float64)
        said = np.fromiter(self._counts, np.int64)
        if self.repetition_penalty != 1:
            seen = np.union1d(self._prompt, said)
            seen = seen[seen < logits.size]
            logits[seen] *= np.where(logits[seen] > 0, 1 / self.repetition_penalty, self.repetition_penalty)
        logits[said] -= self.presence_penalty + self.frequency_penalty * np.fromiter(self._counts.values(), np.float64)
        for token, bias in self.logit_bias.items():
            if 0 <= token < logits.size:
                logits[token] += bias
        if self.grammar is not None:
            logits[~self.grammar.allowed()[: logits.size]] = -math.inf
            if not math.isfinite(float(logits.max())):
                raise GrammarError("no token that the model can write goes on with the grammar of this answer.")
        return logits

    def _chosen(self, logits: np.ndarray) -> int:
        if self.temperature == 0:
            return int(likeliest(logits))
        with np.errstate(over="ignore"):  # the smallest temperatures give -inf and weight 0
            weight = np.exp((logits.astype(np.float64) - float(logits.max())) / self.temperature)
        if self.min_p:
            weight[weight < self.min_p] = 0
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


SETTINGS = tuple(entry for entry in dataclasses.fields(Sampling) if "help" in entry.metadata)
"""The fields that users set."""


def _logprobs(logits: np.ndarray, token: int, most: int) -> TokenLogprobs:
    logits = logits.astype(np.float64)
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    top = np.argsort(-logits, kind="stable")[:most] if most else ()
    return TokenLogprobs(token, float(logits[token]), tuple((int(n), float(logits[n])) for n in top))
