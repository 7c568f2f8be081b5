"""What is asked of a model that is served, and what is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from still_export.runtime.sampling import Sampling, checked_token
from still_export.runtime.speculation import Guesser
from still_export.runtime.stop_texts import StopTexts
from still_export.runtime.text import Text, TextPieces

Ended = Literal["end", "length", "stop", "failed", "refused"]
"""By the model, by max_tokens, by a stop text, by an error, by the server's own end."""


@dataclass(frozen=True)
class Event:
    """What a request is told: text that became certain, and at its end how it ended; `error` says why it failed or was refused."""

    text: str = ""
    ended: Ended | None = None
    error: str = ""


@dataclass(eq=False)
class Request:
    """A prompt and what shall follow it.

    Args:
        max_tokens: Of the answer, at most.
        listener: Called with every event, from the thread that steps; an event that `ended` is the last.
        stop: Texts that end the answer, and are not part of it.
        ignore_eos: The model does not end the answer; for loads whose answers have a length.
        warm: Nothing is answered: the prompt is read for those who ask behind it.
        marks: Tokens whose texts are shown, be they special.

    Attributes:
        tokens: Of the answer so far. cached: Tokens of the prompt that were not read again.
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
        self.fork = 0  # of them that the prompt has in common with others that were read
        self.pieces, self.stops = TextPieces(text, request.marks), StopTexts(request.stop)
        self.guesser: Guesser | None = None

    def token(self, found: np.ndarray, greedy: bool) -> int:
        """The next token by its logits [V], or with `greedy` by the likeliest token; NotFiniteError where there is none."""
        return checked_token(int(found)) if greedy else self.request.sampling.choose(found)

    def say(self, token: int, ends: Sequence[int]) -> Event:
        """The event of the next token."""
        request = self.request
        request.first = request.first or time.perf_counter()
        if token in ends:
            return self._last("end")
        request.tokens.append(token)
        text = self.stops.push(self.pieces.push(token))
        if self.stops.found:
            return Event(text, "stop")
        if len(request.tokens) == request.max_tokens:
            return self._last("length", text)
        return Event(text)

    def _last(self, ended: Ended, text: str = "") -> Event:
        text += self.stops.push(self.pieces.end())
        return Event(text, "stop") if self.stops.found else Event(text + self.stops.end(), ended)
