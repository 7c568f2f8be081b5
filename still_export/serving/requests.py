"""Requests to a served model, the events of their answers, and the queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from still_export.runtime.sampling import RunError, Sampling, TokenLogprobs, checked_token
from still_export.runtime.speculation import Guesser
from still_export.runtime.stop_texts import StopTexts
from still_export.runtime.text import Text, TextPieces

Ended = Literal["end", "length", "stop", "failed", "invalid", "refused"]
"""End by the model, by max_tokens, by a stop text, by an error of the model or of the request's grammar, or because the server stops."""

STOPPING = "the server is stopping. Ask another one, or later."


@dataclass(frozen=True)
class Event:
    """A piece of an answer's text, with `logprobs` of its new tokens if they are asked for; in the last event also how it ended, and the
    `error` if it failed or was refused."""

    text: str = ""
    ended: Ended | None = None
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(eq=False)
class Request:
    """A prompt and the settings of its answer.

    Args:
        max_tokens: Most tokens of the answer.
        listener: Called with every event by the thread that steps; the event with `ended` is the last.
        stop: Texts that end the answer; not part of it.
        ignore_eos: Ignore the model's end token, for load tests with answers of a fixed length.
        warm: Only read the prompt, for later requests; no answer.
        marks: Tokens whose texts are shown although they are special.
        scope: Requests of the same scope share cached prefixes; (): also with later processes; None: with none but published documents.

    Attributes:
        tokens: Tokens of the answer so far. cached: Tokens of the prompt that were not read again.
        arrived, first, done: time.perf_counter() of its submission, first token and end; 0 = not yet.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    listener: Callable[[Event], None]
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    warm: bool = False
    marks: Mapping[int, str] = field(default_factory=dict)
    scope: tuple[int, ...] | None = ()
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    arrived: float = 0.0
    first: float = 0.0
    done: float = 0.0


class Row:
    """A row of the batch with the request that has it."""

    def __init__(self, number: int, request: Request, text: Text) -> None:
        self.number, self.request = number, request
        self.read = 0  # tokens of the prompt
        self.stops = set[int]()  # places in the prompt where its state is needed
        self.leader: Row | None = None  # the row that reads the same beginning, up to the place `meet`
        self.meet = 0
        self.pieces, self.ends = TextPieces(text, request.marks), StopTexts(request.stop)
        self.guesser: Guesser | None = None
        request.sampling.begin(request.prompt)

    def token(self, found: np.ndarray, greedy: bool) -> int:
        """The next token by its logits [V], or with `greedy` by the likeliest token; NotFiniteError where there is none."""
        return checked_token(int(found)) if greedy else self.request.sampling.choose(found)

    def say(self, token: int, ends: Sequence[int]) -> Event:
        request = self.request
        request.first = request.first or time.perf_counter()
        if token in ends:
            return self._last("end")
        request.tokens.append(token)
        found = request.sampling.found
        logprobs = (found[-1],) if found else ()
        text = self.ends.push(self.pieces.push(token))
        if self.ends.found:
            return Event(text, "stop", "", logprobs)
        if request.sampling.ended:
            return self._last("end", text, logprobs)
        if len(request.tokens) == request.max_tokens:
            return self._last("length", text, logprobs)
        return Event(text, None, "", logprobs)

    def _last(self, ended: Ended, text: str = "", logprobs: tuple[TokenLogprobs, ...] = ()) -> Event:
        text += self.ends.push(self.pieces.end())
        if self.ends.found:
            return Event(text, "stop", "", logprobs)
        return Event(text + self.ends.end(), ended, "", logprobs)


class QueueFullError(RunError):
    """As many requests wait as may."""


class StoppingError(RunError):
    """The server is stopping and accepts no more requests."""


class Queue:
    """In the order in which they came. May be used by several threads at once."""

    def __init__(self) -> None:
        self.stopping = False
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._cancelled: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request, most: int) -> None:
        """Let a request wait, of `most` at the same time.

        Raises:
            QueueFullError: Too many wait.
            StoppingError: The server is about to end.
        """
        with self._lock:
            if self.stopping:
                raise StoppingError(STOPPING)
            if len(self._waiting) >= most:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting, which is the limit. Ask again later.")
            request.arrived = time.perf_counter()
            self._waiting.append(request)

    def pop(self) -> Request | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def cancel(self, request: Request) -> None:
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
            elif not request.done:
                self._cancelled.add(request)

    def cancelled(self) -> set[Request]:
        """Requests that were cancelled since the last call, and do not wait."""
        with self._lock:
            found, self._cancelled = self._cancelled, set()
        return found

    def stop(self) -> list[Request]:
        """Accept no more; returns those that waited."""
        with self._lock:
            self.stopping = True
            refused = list(self._waiting)
            self._waiting.clear()
        return refused
