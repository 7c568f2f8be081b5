"""The proof of a serving engine: concurrent requests of all lengths, its tokens and log-probabilities against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from still_export.loading.torch import TorchModel
from still_export.package.calls import next_feed
from still_export.proof.constants import FLOAT32
from still_kernels.registry import ties_of
from still_kernels.ties import Ties

NEAR_TIE = 1e-3
"""Lead below which float32 rounding may turn a choice."""
CODES_TYPE = "float16"
"""Type whose errors in PyTorch bound a float32 package with keys and values in 8 bits: between two codes the last bit decides. With codes,
PyTorch's float32 differs from float64 by 0.13 and 0.21 in two of 24 texts of 257 tokens of a random model of three layers; without, by at
most 1e-5."""
RARE, SPREAD = 0.99, 2.0
"""In half precision an answer's median error may reach the RARE quantile of PyTorch's own errors, and SPREAD times its worst median."""
ROUNDINGS = 24
"""Roundings of PyTorch in half precision that are tried for an answer beyond the bound: at a near tie, each rounding may choose another
token."""
PIECE_TOKENS = 1024
"""Tokens of a prompt in one call of PyTorch."""
CONTEXT_TOKENS = 1536
ANSWER_TOKENS = 96
"""Tokens of an answer, more than a chunk, so that chunks are promoted between single tokens."""
ALIKE = 3
"""Number of texts that prompts begin with if prefixes are cached."""
EDGES = 4
"""Chunks around whose ends prompt lengths are drawn; other lengths are random."""


@dataclass(frozen=True)
class Request:
    """A prompt, the number of tokens to generate, and the engine step before which it arrives."""

    prompt: tuple[int, ...]
    count: int
    arrives: int


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and the log-probabilities that the engine reports."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Load:
    """Settings and load of an engine.

    Args:
        budget_tokens: Tokens of all requests in one step; longer prompts are read in pieces.
        rows: Requests that run at the same time.
        context_tokens: Most tokens of a request.
        preempt_every: Steps after which all running requests are preempted; 0: never.
        tight: Cache size, in multiples of the initial states of all rows plus one full context; 0: the engine's default.
        eager: Without compilation and CUDA graphs.
        prefix_tokens: States are cached after every so many tokens, and prompts have common prefixes; 0: neither.
    """

    name: str
    budget_tokens: int
    rows: int
    context_tokens: int
    preempt_every: int = 0
    tight: float = 0
    eager: bool = False
    prefix_tokens: int = 0


def loads_of(context: int) -> list[Load]:
    """Chunked prefill budgets from 64 tokens on, with regular preemption; requests have at most `context` tokens."""
    return [
        Load("64 tokens a step, 4 rows", 64, 4, context),
        Load("512 tokens a step, 16 rows", 512, 16, context),
        Load("small cache, preempted every 40 steps", 100, 6, context, preempt_every=40, tight=1, eager=True),
    ]


@dataclass(frozen=True)
class Served:
    """Results of a load: answers in the order of requests, number of preemptions, and prompt tokens that came from the cache."""

    answers: list[Answer]
    preemptions: int
    kept_tokens: int = 0


class Engine(Protocol):
    def serve(self, load: Load, requests: Sequence[Request]) -> Served:
        """Answer all requests, each arriving at its step."""


@dataclass
class LoadReport:
    """The verdict on one load.

    Args:
        near_ties: Tokens other than PyTorch's likeliest whose lead is within rounding.
        open_tokens: Tokens after a near tie, of requests beyond the bound; not compared, as the engine does not report its choice.
        turned: In half precision, requests beyond the bound but within it of another rounding of PyTorch, which chooses otherwise.
        kept_tokens: Tokens of prompts that were not read because their states were cached.
        wrong: Requests whose tokens or log-probabilities differ without such a reason.
        worst: The largest number compared with `bound`: an error of a log-probability, or with own errors a request's median error.
    """

    name: str
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    near_ties: int = 0
    open_tokens: int = 0
    turned: int = 0
    kept_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0
    bound: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.wrong

    @property
    def not_asked(self) -> list[str]:
        tokens = f"{self.name}: {self.open_tokens} of {self.tokens} tokens, behind near ties of choices that the engine does not say"
        return [tokens] * bool(self.open_tokens)


@dataclass(frozen=True)
class Bound:
    """Allowed differences of an answer.

    Args:
        error: Largest error of a log-probability, or of an answer's median.
        tie: Largest distance of a token to the likeliest, nats.
        median: Whether the median of an answer is compared, as in half precision.
    """

    error: float
    tie: float
    median: bool = False


@dataclass(frozen=True)
class Compared:
    """An answer against PyTorch: the error to judge, the largest gap to the likeliest token, and the number of tokens with a gap."""

    error: float
    behind: float
    near: int
    within: bool


def compare(answer: Answer, chosen: np.ndarray, best: np.ndarray, bound: Bound, count: int | None = None) -> Compared:
    """Compare the first `count` tokens of an answer (None: all). `chosen` and `best` [n] are PyTorch's log-probabilities of its tokens
    and of the likeliest ones."""
    errors, behind = np.abs(chosen - np.array(answer.logprobs))[:count], (best - chosen)[:count]
    if not errors.size:
        return Compared(0.0, 0.0, 0, True)
    error = float(np.median(errors) if bound.median else errors.max())
    most = float(behind.max())
    near = int(((behind > 0) & (behind <= bound.tie)).sum())
    return Compared(error, most, near, error <= bound.error and most <= bound.tie)


def judge(
    load: Load,
    requests: Sequence[Request],
    served: Served,
    expected: Sequence[np.ndarray],
    bound: Bound,
    sure: Callable[[int], int],
    of_another_rounding: Callable[[int], bool],
) -> LoadReport:
    """Compare every answer with PyTorch.

    Args:
        expected: PyTorch's log-probabilities of each answer's tokens and of the likeliest, [2, n].
        sure: Number of tokens before the first near tie in the answer of a request, by its number.
        of_another_rounding: Whether another rounding of PyTorch in half precision matches a request's answer.
    """
    found = LoadReport(
        load.name,
        requests=len(requests),
        preemptions=served.preemptions,
        kept_tokens=served.kept_tokens,
        bound=bound.error,
    )
    for number, (request, answer, (chosen, best)) in enumerate(zip(requests, served.answers, expected, strict=True)):
        found.tokens += len(answer.tokens)
        name = f"request {number} ({len(request.prompt)} tokens, {request.count} asked)"
        if len(answer.tokens) != request.count:
            found.wrong.append(f"{name}: {len(answer.tokens)} tokens came")
            continue
        whole = compare(answer, chosen, best, bound)
        if not whole.within and (count := sure(number)) < request.count:
            whole = compare(answer, chosen, best, bound, count)
            found.open_tokens += request.count - count
        if whole.within:
            found.near_ties += whole.near
            found.worst = max(found.worst, whole.error)
        elif of_another_rounding(number):
            found.turned += 1
        else:
            found.wrong.append(
                f"{name}: log-probabilities differ by {whole.error:.1e}, a token is {whole.behind:.1e} behind the likeliest"
            )
    if 0 < found.tokens == found.open_tokens:
        found.wrong.append("nothing was compared: every token of every request is beyond the bound, behind a near tie")
    return found


class Reference:
    """PyTorch's log-probabilities along the engine's tokens, so that one other token does not change the rest.

    Args:
        model: In float32, or in the type of `own_type` for its errors.
    """

    def __init__(self, description: dict[str, Any], model: Any) -> None:
        whole = {**description["model"], "all_logits": True}
        self.runner = TorchModel({**description, "model": whole, "prefill_tokens": PIECE_TOKENS}, model)

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the whole vocabulary at each place of `tokens`, [n, V]."""
        runner = self.runner
        runner.start(1, len(prompt) + len(tokens))
        if len(prompt) > 1:
            runner.all_logits = False
            runner.prefill(prompt[:-1])
        runner.all_logits = True
        logits = runner.feed(np.array([[prompt[-1], *tokens[:-1]]], np.int64))[0, : len(tokens)].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@contextmanager
def other_rounding(model: Any, seed: int) -> Iterator[None]:
    """Context with every weight moved randomly within its rounding error, which perturbs results like another rounding."""
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    originals = [weight.detach().clone() for weight in weights]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in weights:
            part = torch.rand(weight.shape, generator=generator).to(weight.device).mul_(2).sub_(1)
            weight.copy_(weight.float() * (1 + torch.finfo(weight.dtype).eps / 2 * part))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, originals, strict=True):
                weight.copy_(old)


def own_type(model: Any, kind: str) -> str | None:
    """The type of PyTorch's own run that bounds an engine in the type `kind`; None: the bound is FLOAT32."""
    if kind != "float32":
        return kind
    return CODES_TYPE if model.config.still.deployment.cache == "int8" else None


class ServedVerifier:
    """Compares an engine with PyTorch.

    Args:
        half: The same in the type of `own_type`, where it names one: its own errors are the bound.
    """

    def __init__(self, description: dict[str, Any], model: Any, half: Any, engine: Engine, seed: int = 0) -> None:
        self.reference = Reference(description, model)
        self.half = None if half is None else Reference(description, half)
        self.ties: Ties = ties_of(description)
        self.engine = engine
        self.random = np.random.default_rng(seed)
        self.vocabulary = int(description["model"]["vocab_size"])
        self.chunk = max(2, self.reference.runner.table.period)

    def run(self, loads: Sequence[Load], requests: int, answer_tokens: int) -> Iterator[LoadReport]:
        """The verdict on each load.

        Args:
            answer_tokens: Most tokens of an answer.
        """
        for load in loads:
            drawn = self.requests(load, requests, answer_tokens)
            yield self.judge(load, drawn, self.engine.serve(load, drawn))

    def requests(self, load: Load, count: int, answer_tokens: int) -> list[Request]:
        """Random prompts that end near chunk ends or anywhere and arrive a few steps apart; with prefix caching, of any length, and
        beginning with any part of shared texts."""
        made: list[Request] = []
        step = 0
        texts: Any = (
            self.random.integers(0, self.vocabulary, (ALIKE, load.context_tokens)) if load.prefix_tokens else []
        )
        for number in range(count):
            answer = int(self.random.integers(1, answer_tokens + 1))
            room = load.context_tokens - answer
            if load.prefix_tokens:
                length = int(self.random.integers(1, room + 1))
            elif number % 2:
                length = self.chunk * int(self.random.integers(0, EDGES + 1)) + int(self.random.integers(-1, 3))
            else:
                length = int(np.exp(self.random.uniform(0, np.log(room))))
            prompt = self.random.integers(0, self.vocabulary, min(max(length, 1), room))
            if load.prefix_tokens:
                alike = int(self.random.integers(0, len(prompt) + 1))
                prompt[:alike] = texts[int(self.random.integers(0, ALIKE))][:alike]
            made.append(Request(tuple(prompt.tolist()), answer, step))
            step += int(self.random.integers(0, 6))
        return made

    def judge(self, load: Load, requests: Sequence[Request], served: Served) -> LoadReport:
        """Compare every answer with PyTorch."""
        expected, own = self._along(requests, served.answers)
        bound = self._bound(expected, own)

        def sure(number: int) -> int:
            return self._sure(requests[number], served.answers[number])

        def of_another_rounding(number: int) -> bool:
            return self._of_another_rounding(requests[number], served.answers[number], bound)

        return judge(load, requests, served, expected, bound, sure, of_another_rounding)

    def _along(
        self, requests: Sequence[Request], answers: Sequence[Answer]
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """PyTorch's log-probabilities of each answer's tokens and of float32's likeliest ones, [2, n]; the same in the type of `own_type`,
        or None."""
        expected, own = [], []
        for request, answer in zip(requests, answers, strict=True):
            exact = self.reference.logprobs(request.prompt, answer.tokens)
            places = np.arange(len(answer.tokens)), np.stack([np.array(answer.tokens, np.int64), exact.argmax(-1)])
            expected.append(exact[places])
            if self.half is not None:
                own.append(self.half.logprobs(request.prompt, answer.tokens)[places])
        return expected, None if self.half is None else own

    def _bound(self, expected: list[np.ndarray], own: list[np.ndarray] | None) -> Bound:
        if own is None:
            return Bound(FLOAT32, 2 * FLOAT32)
        errors = [np.abs(a - b) for a, b in zip(expected, own, strict=True)]
        usual = float(np.quantile(np.concatenate([e[0] for e in errors]), RARE, method="higher"))
        worst = max(float(np.median(e[0])) for e in errors)
        return Bound(max(usual, SPREAD * worst), 2 * max(float(e.max()) for e in errors), median=True)

    def _of_another_rounding(self, request: Request, answer: Answer, bound: Bound) -> bool:
        """Whether one of several half-precision roundings of PyTorch matches the answer within the bounds."""
        if self.half is None:
            return False
        places = np.arange(len(answer.tokens)), np.array(answer.tokens, np.int64)
        for seed in range(ROUNDINGS):
            with other_rounding(self.half.runner.model, seed):
                logprobs = self.half.logprobs(request.prompt, answer.tokens)
            if compare(answer, logprobs[places], logprobs.max(-1), bound).within:
                return True
        return False

    def _sure(self, request: Request, answer: Answer) -> int:
        """Number of an answer's tokens before PyTorch's first near tie, in float32."""
        if self.half is not None or not self.ties.each:
            return len(answer.tokens)
        tokens = np.array([[*request.prompt, *answer.tokens]], np.int64)
        past, looks = self.reference.runner.empty_feed(*tokens.shape), []
        for start in range(0, tokens.shape[1], self.ties.span):
            feed = {**past, **next_feed({}, tokens[:, start : start + self.ties.span])}
            looks.append((past["past_length"], self.reference.runner.infer(feed)))
            past = next_feed(looks[-1][1], tokens)
            if self.ties.closest(self.ties.scores(looks), past["past_length"]) <= NEAR_TIE:
                return min(max(start + 1 - len(request.prompt), 0), len(answer.tokens))
        return len(answer.tokens)
