"""Decoding: prompts in pieces, then greedy or sampled tokens, optionally with guesses. No torch, no runtime.

Exports copy this file into packages, with the runners (`still_export.package.programs`).
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from still_export.runtime.feeding import Feeding
from still_export.runtime.sampling import RunError, Sampling, checked_token, likeliest
from still_export.runtime.speculation import Speculation

Progress = Callable[[int, int], None]
"""Called with the tokens fed and their total after each piece of a prompt."""


def checked_prompt(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    """The prompt as int64 [T].

    Raises:
        RunError: It is empty, or has ids outside the vocabulary.
    """
    prompt = list(tokens)
    if not prompt:
        raise RunError("the prompt has no tokens. Give at least one.")
    least, most = min(prompt), max(prompt)  # of any size: NumPy's are checked already
    if least < 0 or most >= vocabulary:
        raise RunError(
            f"token ids {str(least)[:20]}..{str(most)[:20]} are outside the vocabulary 0..{vocabulary - 1}. "
            "Give ids of this model's tokenizer."
        )
    return np.asarray(prompt, np.int64)


@dataclass(frozen=True, eq=False)
class Guess:
    """A call with guessed tokens that waits for `accept`.

    Args:
        apart: The new states lie in a second buffer, because rejecting tokens changes them.
        first: First sequence of the call.
        part: The caller's sequences among those of the call.
        new_tokens: Number of new tokens of each sequence, [R].
        tokens: Columns of the call.
    """

    apart: bool
    first: int
    part: slice
    new_tokens: np.ndarray
    tokens: int


class Turns:
    """Who may change a model's state: one caller at a time, in whichever thread.

    An answer is generated while its caller iterates it, so others may call in between. A new turn ends the one before.

    Attributes:
        lock: Held during each change; may be held for several.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._now = 0

    def take(self) -> int:
        """Begin a new turn; returns its number."""
        with self.lock:
            self._now += 1
            return self._now

    @contextmanager
    def held(self, turn: int) -> Iterator[None]:
        """Inside the block nobody else changes the state.

        Raises:
            RunError: Another turn has begun.
        """
        with self.lock:
            if turn != self._now:
                raise RunError(
                    "another call has used this model since, and it has one state, so this answer cannot go on. Read a stream to its "
                    "end before the next call, or load the package once for each; `still-export serve` answers several at a time."
                )
            yield


class Decoder(ABC):
    """A model whose sequences have seen `length` [B] tokens each; runners implement feeding and states."""

    manifest: dict[str, Any]
    length: np.ndarray
    guessed: Guess | None = None
    """The call of `guess` that waits for `accept`, or None."""
    speculation: Speculation | None = None
    """Speculation in `generate`; None: no guesses."""

    @cached_property
    def feeding(self) -> Feeding:
        """Rules of feeding for `prefill`, `step`, `greedy` and `generate`; `feed` ignores them; `length` counts all tokens."""
        return Feeding.of(self.manifest)

    @cached_property
    def turns(self) -> Turns:
        """Orders callers that share this model."""
        return Turns()

    @property
    def prefill_tokens(self) -> int:
        """Tokens of one prefill call. Longer prompts are fed in pieces, so that memory is bounded, unless the model needs whole prompts."""
        return sys.maxsize if self.feeding.whole_prompts else int(self.manifest["prefill_tokens"])

    @abstractmethod
    def reserve(self, tokens: int | np.ndarray, first: int = 0) -> None: ...

    @abstractmethod
    def check_capacity(self, tokens: int) -> None: ...

    @abstractmethod
    def feed(self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0) -> np.ndarray: ...

    @abstractmethod
    def guess(
        self, input_ids: np.ndarray, new_tokens: np.ndarray | None = None, first: int = 0, greedy: bool = False
    ) -> np.ndarray: ...

    @abstractmethod
    def accept(self, accepted: np.ndarray) -> None: ...

    def prefill(self, tokens: Iterable[int], progress: Progress | None = None) -> np.ndarray:
        """Feed a prompt to the single sequence in pieces of `prefill_tokens`; logits [V] of its last token."""
        prompt = checked_prompt(tokens, self.manifest["model"]["vocab_size"])
        prompt, _ = self.feeding.fed(prompt, int(self.length[0]))
        self.reserve(prompt.size)
        for start in range(0, prompt.size, self.prefill_tokens):
            logits = self.feed(prompt[None, start : start + self.prefill_tokens])
            if progress is not None:
                progress(min(start + self.prefill_tokens, prompt.size), prompt.size)
        return logits[0, -1]

    def greedy(self, token: np.ndarray, count: int) -> Iterator[np.ndarray]:
        """The `count` greedy tokens [B] after `token` [B].

        Raises:
            NotFiniteError: The logits of a sequence are no finite numbers.
        """
        for _ in range(count):
            token = likeliest(self.step(token))
            checked_token(int(token.min()))
            yield token

    def step(self, token: np.ndarray) -> np.ndarray:
        """Feed one token to every sequence, [B]; logits [B, V]."""
        if not self.feeding.every:
            return self.feed(token[:, None])[:, -1]
        ids, counts = self.feeding.step(token, self.length)
        found = self.feed(ids, counts)
        return found[np.arange(len(found)), counts - 1 if found.shape[1] > 1 else 0]

    def generate(
        self,
        prompt: Iterable[int],
        count: int,
        sampling: Sampling,
        stop: Iterable[int] = (),
        progress: Progress | None = None,
        before: Sequence[int] = (),
        turn: int | None = None,
    ) -> Iterator[int]:
        """Sample at most `count` tokens after `prompt` in the single sequence, up to one of `stop`, which is not yielded.

        The last one is not fed to the model.

        Args:
            before: What the model has read, for guesses alone.
            turn: Whose turn it is; None: it begins with the first token.

        Raises:
            RunError: They and the prompt may exceed the capacity; nothing was fed then. Or another call has used the model meanwhile.
            NotFiniteError: Logits are no finite numbers.
        """
        turn = self.turns.take() if turn is None else turn
        tokens = self._generated(prompt, count, sampling, stop, progress, before)
        while True:
            with self.turns.held(turn):
                token = next(tokens, None)
            if token is None:
                return
            yield token

    def _generated(
        self,
        prompt: Iterable[int],
        count: int,
        sampling: Sampling,
        stop: Iterable[int],
        progress: Progress | None,
        before: Sequence[int],
    ) -> Iterator[int]:
        stops, prompt = set(stop), list(prompt)
        feeding = self.feeding
        self.check_capacity(feeding.length(feeding.text_tokens(int(self.length[0])) + len(prompt) + count - 1))
        sampling.begin([*before, *prompt])
        token = sampling.choose(self.prefill(prompt, progress))
        rest = self._sampled(token, count - 1, sampling)
        if self.speculation is not None:
            rest = self._guessing(token, count - 1, sampling, self.speculation, [*before, *prompt])
        elif sampling.greedy:
            rest = (checked_token(int(following[0])) for following in self.greedy(np.array([token]), count - 1))
        for _ in range(count):
            if token in stops:
                return
            yield token
            if sampling.ended:
                return
            token = next(rest, -1)

    def _guessing(
        self, token: int, count: int, sampling: Sampling, speculation: Speculation, known: list[int]
    ) -> Iterator[int]:
        """Yields the same as `_sampled`, in steps with guesses."""
        # Each token is chosen from its own logits by one random number, so the distribution is the same.
        guesser, greedy = speculation.guesser([*known, token], 0), sampling.greedy
        while count > 0:
            begun = time.perf_counter()
            guesses = speculation.guess(guesser, count - 1)
            if guesses:
                rows = self.guess(np.array([[token, *guesses]]), greedy=greedy)[0]
                call, chosen = self.guessed, list[int]()
                spent = time.perf_counter() - begun
                try:
                    for row, guess in zip(rows, [*guesses, -1], strict=True):
                        chosen.append(checked_token(int(row)) if greedy else sampling.choose(row))
                        yield chosen[-1]
                        if chosen[-1] != guess or sampling.ended:
                            break
                finally:  # also if the caller stops: everything yielded was fed, except the last
                    if self.guessed is call:
                        begun = time.perf_counter()
                        self.accept(np.array([len(chosen)]))
                        spent += time.perf_counter() - begun
                speculation.guessed(spent, [len(guesses)], [len(chosen) - 1])
            else:
                last = np.array([token])
                chosen = [int(next(self.greedy(last, 1))[0]) if greedy else sampling.choose(self.step(last)[0])]
                speculation.plain(time.perf_counter() - begun)
                yield chosen[0]
            guesser.extend(chosen)
            count, token = count - len(chosen), chosen[-1]

    def _sampled(self, token: int, count: int, sampling: Sampling) -> Iterator[int]:
        for _ in range(count):
            token = sampling.choose(self.step(np.array([token], np.int64))[0])
            yield token
