"""Which row of the batch reads or says what, token by token. Plain and synchronous: knows no HTTP, and no thread but its callers'."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from still_export.runtime.base import Runner
from still_export.runtime.decoding import checked_prompt
from still_export.runtime.feeding import Feeding
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.sampling import NotFiniteError, RunError, Sampling, checked_token
from still_export.runtime.speculation import Guesser
from still_export.runtime.stop_texts import StopTexts
from still_export.runtime.text import Text, TextPieces

Ended = Literal["end", "length", "stop", "failed", "refused"]
"""By the model, by max_tokens, by a stop text, by an error, by the server's own end."""

KEPT_TOKENS = 2048
"""Room that a model without requests keeps: growing again copies."""

KEPT_S = 30.0
"""How long it keeps more, for the next turn of a conversation."""

GRID = 64
"""Tokens at whose multiples prompts of reproducible answers are cut: kernels for CPUs read whole chunks of so many in one call or in
several with the same sums."""

LEAST_FORK = 16
"""Tokens that two prompts share beyond what was kept, for a state of its own where they part: what is cheaper to read is read again."""


class QueueFullError(RunError):
    """As many requests wait as may."""


class StoppingError(RunError):
    """The server is stopping and accepts no more requests."""


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


class _Row:
    """A row of the batch with the request that has it."""

    def __init__(self, number: int, request: Request, text: Text) -> None:
        self.number, self.request = number, request
        self.read = 0  # tokens of the prompt
        self.fork = 0  # of them that the prompt has in common with others that were read
        self.pieces, self.stops = TextPieces(text, request.marks), StopTexts(request.stop)
        self.guesser: Guesser | None = None

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


class Scheduler:
    """Requests share the rows of one batch; they join and leave it between two tokens.

    A round reads one piece of one prompt, then one more token of every answer: a long prompt delays the answers of others by a piece at a
    time, and readers take turns. `submit`, `cancel` and `stop` may be called while another thread steps.

    Args:
        rows: Of the batch: requests that run at the same time.
        waiting: Requests that may wait for a row, at most.
        context: Tokens of prompt and answer, at most; None: the package's capacity.
        piece: Tokens of a prompt that are read at once.
        prefixes: Keeps the states of prompts and answers; None: every prompt is read from its beginning.
        reproducible: A request's numbers are the same bits whoever is served beside it and whatever was read before. Prompts are cut at
            multiples of GRID tokens, states are kept only there, and nothing is guessed.

    Raises:
        RunError: More rows or tokens than the package allows, or it cannot be reproducible.
    """

    def __init__(
        self,
        model: Runner,
        text: Text,
        rows: int = 4,
        waiting: int = 64,
        context: int | None = None,
        piece: int = 256,
        prefixes: PrefixCache | None = None,
        reproducible: bool = False,
    ) -> None:
        feeding = Feeding.of(model.manifest)
        if feeding.every:
            raise RunError(
                f"this model wants a token of its own behind every {feeding.every}, which `still-export run` and `evaluate` give it; "
                "it is not served."
            )
        self.model, self.text, self.waiting, self.prefixes = model, text, waiting, prefixes
        self.context = context or model.table.capacity_tokens
        model.check_capacity(self.context - 1)  # the last token of an answer is not fed
        self.piece = model.prefill_tokens if feeding.whole_prompts else min(piece, model.prefill_tokens)
        self.grid = 0  # tokens at whose multiples alone states are kept; 0: everywhere
        if reproducible:
            self._demand_reproducible()
            model.speculation = None
            if not feeding.whole_prompts:
                self.grid, self.piece = GRID, max(self.piece // GRID, 1) * GRID
        model.start(rows)
        self.stopping = False
        self.broken = ""
        """Why the last call failed; empty where it did not."""
        self._ends: list[int] = model.manifest["eos_token_ids"]
        self._lock = threading.Lock()
        self._queue: deque[Request] = deque()
        self._cancelled: set[Request] = set()
        self._rows: list[_Row | None] = [None] * rows
        self._readers: deque[_Row] = deque()
        self._left: list[list[int]] = [[] for _ in range(rows)]  # what the states in free rows have read
        self._left_at = [0.0] * rows

    def _demand_reproducible(self) -> None:
        """Raise RunError where numbers depend on other rows, or on where prompts are cut."""
        if not self.model.reproducible:
            raise RunError(
                "--reproducible needs the package's own kernels for CPUs: run it there in ONNX Runtime, exported with --native, and "
                "loaded (--trust-native where another machine built them)."
            )
        if self.model.prefill_tokens < GRID:
            raise RunError(
                f"--reproducible cuts prompts every {GRID} tokens, and this package reads {self.model.prefill_tokens} at once at most. "
                "Export it again with a larger --prefill-tokens."
            )

    @property
    def places(self) -> int:
        """Requests that run or wait at most."""
        return self.waiting + len(self._rows)

    @property
    def queued(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(row is not None for row in self._rows)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.running

    def state_bytes(self, tokens: int) -> int:
        """Size of the state with room for `tokens` tokens in every row."""
        table = self.model.table
        return table.size_bytes(len(self._rows), table.rows(tokens, self.model.least_rows))

    def submit(self, request: Request) -> None:
        """Take a request; its listener hears of it from now on.

        Raises:
            RunError: It has no tokens, unknown ones, or more than the context.
            QueueFullError: Too many wait.
            StoppingError: The server is about to end.
        """
        prompt = checked_prompt(request.prompt, self.model.manifest["model"]["vocab_size"])
        StopTexts(request.stop)
        if request.max_tokens < 1:
            raise RunError(f"max_tokens={request.max_tokens}; it must be at least 1.")
        if prompt.size + request.max_tokens > self.context:
            raise RunError(
                f"the context holds {self.context} tokens; the prompt has {prompt.size} and max_tokens asks for "
                f"{request.max_tokens}. Shorten one of them."
            )
        with self._lock:
            if self.stopping:
                raise StoppingError("the server is stopping. Ask another one, or later.")
            # Requests for which a row is free wait for the next round alone.
            if len(self._queue) >= self.places - self.running:
                raise QueueFullError(f"{len(self._queue)} requests are waiting, which is the limit. Ask again later.")
            request.arrived = time.perf_counter()
            self._queue.append(request)

    def cancel(self, request: Request) -> None:
        """Let go of a request: from the next round on its listener hears nothing more. One that has ended stays ended."""
        with self._lock:
            if request in self._queue:
                self._queue.remove(request)
            elif not request.done:
                self._cancelled.add(request)

    def stop(self) -> None:
        """Refuse new requests and those that wait; what has a row runs to its end."""
        with self._lock:
            self.stopping = True
            refused = list(self._queue)
            self._queue.clear()
        for request in refused:
            self._finish(request, Event("", "refused", "the server is stopping. Ask another one, or later."))

    def give_up(self, error: Exception) -> None:
        """End every request and accept no more: the model failed."""
        self.stop()
        self._fail([row for row in self._rows if row is not None], error)

    def step(self) -> bool:
        """One round; False where there was nothing to do. Raises nothing: what fails ends the requests that it is about."""
        try:
            self._let_go()
            self._admit()
            if not self.running:
                if self.model.room > KEPT_TOKENS and time.perf_counter() - max(self._left_at) > KEPT_S:
                    self.model.start(len(self._rows))
                    self._left = [[] for _ in self._rows]
                return False
            self._read()
            self._speak()
        except BaseException as error:  # a tokenizer's panic, too: nobody's fault, so everybody's
            self._fail([row for row in self._rows if row is not None], error)
        return True

    def _let_go(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        for row in [r for r in self._rows if r is not None and r.request in cancelled]:
            row.request.done = time.perf_counter()
            self._free(row)

    def _admit(self) -> None:
        """Give free rows to those that wait: the one that has read most of a prompt, or whose state was left longest ago; the lowest of
        them, since a call spans the rows from the first to the last that it needs."""
        while free := [number for number, row in enumerate(self._rows) if row is None]:
            with self._lock:
                if not self._queue:
                    return
                request = self._queue.popleft()
            number = max(free, key=lambda n: (self._has_read(n, request), -self._left_at[n]))
            taken = self._rows[number] = _Row(number, request, self.text)
            try:
                self._begin(taken)
            except Exception as error:  # of any runtime; other requests go on
                self._fail([taken], error)
                continue
            self._readers.append(taken)

    def _read(self) -> None:
        """Read the next piece of the prompt whose turn it is."""
        if not self._readers:
            return
        row = self._readers[0]
        piece = row.request.prompt[row.read : self._place(row)]
        found = self._call([row], [piece], self.model.feed)
        if found is None:
            return
        self._readers.popleft()
        row.read += len(piece)
        if row.read < len(row.request.prompt):
            self._readers.append(row)
            self._keep(row)
        elif row.request.warm:
            self._keep(row, lasting=True)
            self._free(row)
            self._finish(row.request, Event("", "end"))
        else:
            self._choose(row, found[0][-1])
            if self._rows[row.number] is row:
                self._keep(row)

    def _place(self, row: _Row) -> int:
        """Where the next piece of a prompt ends: at multiples of the pieces, where prompts meet, and where others leave its beginning."""
        end = min((row.read // self.piece + 1) * self.piece, len(row.request.prompt))
        if self.grid and row.read < self._on_grid(end):
            end = self._on_grid(end)
        return row.fork if row.read < row.fork < end else end

    def _on_grid(self, tokens: int) -> int:
        """The last place up to `tokens` where states may be kept."""
        return tokens // self.grid * self.grid if self.grid else tokens

    def _begin(self, row: _Row) -> None:
        """Put the row, which has what another request left, behind what is known of its prompt."""
        row.read = self._has_read(row.number, row.request)
        kept = self.prefixes.find(row.request.prompt) if self.prefixes else None
        if self.prefixes and kept and kept.length > row.read:
            self.model.put(row.number, self.prefixes.state(kept), kept.length)
            row.read = kept.length
        elif not row.read:
            self.model.forget(row.number)
        if self.prefixes:
            row.request.cached = row.read
            fork = self.prefixes.known(row.request.prompt)
            row.fork = self._on_grid(fork) if fork - row.read >= LEAST_FORK else 0
            self.prefixes.asked += len(row.request.prompt)
            self.prefixes.found += row.read

    def _has_read(self, number: int, request: Request) -> int:
        """How much of a prompt the state that was left in a free row has read."""
        left = self._left[number]
        return len(left) if len(left) < len(request.prompt) and list(request.prompt[: len(left)]) == left else 0

    def _read_by(self, row: _Row) -> list[int]:
        """The tokens that a row's state has read."""
        return [*row.request.prompt, *row.request.tokens][: int(self.model.length[row.number])]

    def _keep(self, row: _Row, lasting: bool = False) -> None:
        """Keep the state of all that the row has read; on a grid, of a prompt's beginning alone, which was read in pieces of it."""
        if not self.prefixes:
            return
        read = self._read_by(row)
        if self.grid:
            if not self._bare(row):
                return
            lasting = len(read) == self._on_grid(len(row.request.prompt))
        try:
            self.prefixes.keep(read, self.model.take(row.number), len(read), lasting)
        except MemoryError:
            print("memory is full: the prefix cache is emptied. Give it less: --prefix-cache", file=sys.stderr)
            self.prefixes.clear()

    def _bare(self, row: _Row) -> bool:
        """The row has read the beginning of a prompt alone, which ends on the grid."""
        read = int(self.model.length[row.number])
        return read == row.read == self._on_grid(read)

    def _speak(self) -> None:
        """One more token of every answer that has begun, and those that were guessed."""
        rows = [r for r in self._rows if r is not None and r.request.tokens]
        if not rows:
            return
        begun, speculation = time.perf_counter(), self.model.speculation
        guesses = [self._guesses(row, len(rows)) for row in rows]
        last = [[row.request.tokens[-1], *guessed] for row, guessed in zip(rows, guesses, strict=True)]
        if any(guesses):
            self._speak_guessed(rows, last, begun)
            return
        greedy = all(row.request.sampling.temperature == 0 for row in rows)
        found = self._call(rows, last, self.model.feed_greedy if greedy else self.model.feed)
        if speculation is not None:
            speculation.plain(time.perf_counter() - begun, len(rows))
        for row, said in zip(rows, found or (), strict=False):
            self._choose(row, said[-1], greedy)

    def _guesses(self, row: _Row, sequences: int) -> list[int]:
        """What may follow in a row, of as many that speak."""
        request, speculation = row.request, self.model.speculation
        if speculation is None:
            return []
        if row.guesser is None:
            row.guesser = speculation.guesser([*request.prompt, *request.tokens], row.number)
        return speculation.guess(row.guesser, request.max_tokens - len(request.tokens) - 1, sequences)

    def _speak_guessed(self, rows: list[_Row], last: list[list[int]], begun: float) -> None:
        """The tokens of answers that follow `last`, what was said and guesses behind it, as far as these are what is chosen."""
        greedy, speculation = all(row.request.sampling.temperature == 0 for row in rows), self.model.speculation
        found = self._call(rows, last, partial(self.model.guess, greedy=greedy))
        if found is None or speculation is None:
            return
        told: list[list[Event]] = []
        failed: dict[int, NotFiniteError] = {}
        for row, logits, given in zip(rows, found, last, strict=True):
            events = list[Event]()
            for choices, guess in zip(logits[-len(given) :], [*given[1:], -1], strict=True):
                try:
                    token = _token(row, choices, greedy)
                except NotFiniteError as error:
                    failed[row.number] = error
                    break
                events.append(self._event(row, token))
                if events[-1].ended or token != guess:
                    break
            told.append(events)
        accepted = np.zeros(rows[-1].number + 1 - rows[0].number, np.int64)
        accepted[[row.number - rows[0].number for row in rows]] = [len(events) for events in told]
        self.model.accept(accepted)  # before an answer that ended is kept
        held = [max(len(events) - 1, 0) for events in told]
        speculation.guessed(time.perf_counter() - begun, [len(given) - 1 for given in last], held)
        for row, events in zip(rows, told, strict=True):
            for event in events:
                self._tell(row, event)
            if row.number in failed:
                self._end(row, str(failed[row.number]))

    def _call(
        self, rows: list[_Row], tokens: Sequence[Sequence[int]], feed: Callable[..., np.ndarray]
    ) -> list[np.ndarray] | None:
        """What `feed` says of each row that reads its tokens; None where the call failed and they ended.

        A call spans the rows from the first to the last of `rows`. One that fails may leave their states half written; other rows it does
        not touch.
        """
        first = rows[0].number
        ids = np.zeros((rows[-1].number + 1 - first, max(map(len, tokens))), np.int64)
        counts = np.zeros(len(ids), np.int64)
        for row, given in zip(rows, tokens, strict=True):
            ids[row.number - first, : len(given)], counts[row.number - first] = given, len(given)
        try:
            found = feed(ids, counts, first)
        except Exception as error:  # of any runtime; other requests go on
            self._fail(rows, error)
            return None
        self.broken = ""
        return [found[row.number - first] for row in rows]

    def _fail(self, rows: list[_Row], error: BaseException) -> None:
        """End the requests of `rows` with an error."""
        self.broken = " ".join(str(error).split()) or type(error).__name__
        print(f"a call failed: {self.broken}", file=sys.stderr)
        for row in rows:
            self._end(row, "the model failed on this request.")

    def _end(self, row: _Row, why: str) -> None:
        """End the request of a row with an error; its state is not used again."""
        self._free(row)
        self._left[row.number] = []
        self._finish(row.request, Event("", "failed", why))

    def _choose(self, row: _Row, found: np.ndarray, greedy: bool = False) -> None:
        """Say the next token of a row; where there is none, its request ends, and no other."""
        try:
            token = _token(row, found, greedy)
        except NotFiniteError as error:
            self._end(row, str(error))
        else:
            self._tell(row, self._event(row, token))

    def _event(self, row: _Row, token: int) -> Event:
        if row.guesser is not None:
            row.guesser.extend([token])
        return row.say(token, () if row.request.ignore_eos else self._ends)

    def _tell(self, row: _Row, event: Event) -> None:
        if event.ended:
            self._keep(row, lasting=True)
            self._free(row)
            self._finish(row.request, event)
        elif event.text:
            row.request.listener(event)

    def _finish(self, request: Request, event: Event) -> None:
        request.done = time.perf_counter()
        request.listener(event)

    def _free(self, row: _Row) -> None:
        self._rows[row.number] = None
        if self.prefixes:
            kept = self._read_by(row) if not self.grid or self._bare(row) else []
            self._left[row.number], self._left_at[row.number] = kept, time.perf_counter()
        if row in self._readers:
            self._readers.remove(row)


def _token(row: _Row, found: np.ndarray, greedy: bool) -> int:
    """The next token of a row by its logits [V], or with `greedy` by the likeliest token; NotFiniteError where there is none."""
    return checked_token(int(found)) if greedy else row.request.sampling.choose(found)
