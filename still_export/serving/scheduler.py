"""Schedules reading and generating over the rows of the batch, token by token. Synchronous, without HTTP or threads of its own."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from still_export.runtime.base import Runner
from still_export.runtime.decoding import checked_prompt
from still_export.runtime.feeding import Feeding
from still_export.runtime.prefixes import PrefixCache, alike
from still_export.runtime.sampling import GrammarError, RunError
from still_export.runtime.stop_texts import StopTexts
from still_export.runtime.text import Text
from still_export.serving.requests import STOPPING, Event, Queue, Request, Row
from still_export.serving.rows import LEAST_FORK, Rows

GRID = 64
"""Prompts of reproducible answers are cut at multiples of so many tokens: CPU kernels compute whole chunks of this size with the same sums
in one call or several."""


class Scheduler:
    """Runs requests in the rows of one batch; they join and leave between two tokens.

    A round reads one piece of one prompt, then one more token of every answer: a long prompt delays the answers of others by a piece at a
    time, and readers take turns. A beginning that several prompts have in common is read once. `submit`, `cancel` and `stop` may be called
    while another thread steps.

    Args:
        rows: Requests that run at the same time.
        waiting: Most requests that wait for a row.
        context: Most tokens of prompt and answer; None: the package's capacity.
        piece: Tokens of a prompt that are read at once.
        prefixes: Cache of the states of prompts and answers; None: every prompt is read from its beginning.
        reproducible: A request's logits are bit-identical whatever else runs or ran before. Prompts are cut at multiples of GRID tokens,
            states are cached only there, and nothing is guessed.

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
        grid = 0
        if reproducible:
            self._demand_reproducible()
            model.speculation = None
            if not feeding.whole_prompts:
                grid, self.piece = GRID, max(self.piece // GRID, 1) * GRID
        self._queue, self._rows = Queue(), Rows(model, rows, prefixes, grid)
        self._readers: deque[Row] = deque()
        self.broken = ""
        """Why the last call failed; empty where it did not."""
        self._ends: list[int] = model.manifest["eos_token_ids"]

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
        return len(self._queue)

    @property
    def running(self) -> int:
        return self._rows.running

    @property
    def idle(self) -> bool:
        return not self.queued and not self.running

    @property
    def stopping(self) -> bool:
        return self._queue.stopping

    def state_bytes(self, tokens: int) -> int:
        """Size of the state with room for `tokens` tokens in every row."""
        table = self.model.table
        return table.size_bytes(len(self._rows), table.rows(tokens, self.model.least_rows))

    def submit(self, request: Request) -> None:
        """Accept a request; its listener is called from now on.

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
        # Requests for which a row is free wait for the next round alone.
        self._queue.push(request, self.places - self.running)

    def cancel(self, request: Request) -> None:
        """Let go of a request: from the next round on its listener hears nothing more. One that has ended stays ended."""
        self._queue.cancel(request)

    def stop(self) -> None:
        """Refuse new requests and those that wait; what has a row runs to its end."""
        for request in self._queue.stop():
            self._finish(request, Event("", "refused", STOPPING))

    def give_up(self, error: Exception) -> None:
        """End every request and accept no more: the model failed."""
        self.stop()
        self._fail(list(self._rows), error)

    def step(self) -> bool:
        """One round; False where there was nothing to do. Raises nothing: what fails ends the requests that it is about."""
        try:
            self._let_go()
            self._admit()
            if not self.running:
                self._rows.shrink()
                return False
            self._read()
            self._speak()
        except BaseException as error:  # also a tokenizer's panic; no single row is at fault, so all fail
            self._fail(list(self._rows), error)
        return True

    def _let_go(self) -> None:
        cancelled = self._queue.cancelled()
        for row in [row for row in self._rows if row.request in cancelled]:
            row.request.done = time.perf_counter()
            self._free(row)

    def _admit(self) -> None:
        while self.running < len(self._rows) and (request := self._queue.pop()):
            row = self._rows.take(request, self.text)
            try:
                self._rows.begin(row)
            except Exception as error:  # of any runtime; other requests go on
                self._fail([row], error)
                continue
            self._line_up(row)

    def _line_up(self, row: Row) -> None:
        """Let a row read its prompt, or wait for a row that is about to read the same beginning."""
        prompt, scope, row.leader = row.request.prompt, row.request.scope, None
        for other in self._readers if scope is not None and not self.model.feeding.whole_prompts else ():
            if other.request.scope == scope:
                meet = self._rows.on_grid(min(alike(prompt, other.request.prompt), len(prompt) - 1))
                if meet > other.read and meet - row.read >= LEAST_FORK and (row.leader is None or meet > row.meet):
                    row.leader, row.meet = other, meet
        if row.leader is None:
            self._readers.append(row)
        else:
            row.leader.stops.add(row.meet)

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
        for follower in [other for other in self._rows if other.leader is row and other.meet == row.read]:
            self._rows.follow(follower, row)
            self._line_up(follower)
        if row.read < len(row.request.prompt):
            self._readers.append(row)
            self._rows.keep(row)
        elif row.request.warm:
            self._rows.keep(row, lasting=True)
            self._free(row)
            self._finish(row.request, Event("", "end"))
        else:
            self._choose(row, found[0][-1])
            if row in self._rows:
                self._rows.keep(row)

    def _place(self, row: Row) -> int:
        """Where the next piece of a prompt ends: at multiples of the pieces, where prompts meet, and where others leave its beginning."""
        end = min((row.read // self.piece + 1) * self.piece, len(row.request.prompt))
        if row.read < self._rows.on_grid(end):
            end = self._rows.on_grid(end)
        return min((stop for stop in row.stops if row.read < stop < end), default=end)

    def _speak(self) -> None:
        """Send the next token of every answer that has begun, and correctly guessed ones."""
        rows = [row for row in self._rows if row.request.tokens]
        if not rows:
            return
        begun, speculation = time.perf_counter(), self.model.speculation
        guesses = [self._guesses(row, len(rows)) for row in rows]
        last = [[row.request.tokens[-1], *guessed] for row, guessed in zip(rows, guesses, strict=True)]
        if any(guesses):
            self._speak_guessed(rows, last, begun)
            return
        greedy = all(row.request.sampling.greedy for row in rows)
        found = self._call(rows, last, self.model.feed_greedy if greedy else self.model.feed)
        if speculation is not None:
            speculation.plain(time.perf_counter() - begun, len(rows))
        for row, choices in zip(rows, found or (), strict=False):
            self._choose(row, choices[-1], greedy)

    def _guesses(self, row: Row, sequences: int) -> list[int]:
        """Guessed tokens of a row, in a step of `sequences` rows."""
        request, speculation = row.request, self.model.speculation
        if speculation is None:
            return []
        if row.guesser is None:
            row.guesser = speculation.guesser([*request.prompt, *request.tokens], row.number)
        return speculation.guess(row.guesser, request.max_tokens - len(request.tokens) - 1, sequences)

    def _speak_guessed(self, rows: list[Row], last: list[list[int]], begun: float) -> None:
        """Feed `last`, the last token and guesses of each row, and send the tokens up to the first wrong guess."""
        greedy, speculation = all(row.request.sampling.greedy for row in rows), self.model.speculation
        found = self._call(rows, last, partial(self.model.guess, greedy=greedy))
        if found is None or speculation is None:
            return
        row_events: list[list[Event]] = []
        failed: dict[int, RunError] = {}
        for row, logits, tokens in zip(rows, found, last, strict=True):
            events = list[Event]()
            for choices, guess in zip(logits[-len(tokens) :], [*tokens[1:], -1], strict=True):
                try:
                    token = row.token(choices, greedy)
                    events.append(self._event(row, token))
                except (
                    RunError
                ) as error:  # logits that are not finite, a grammar without a next token, a tokenizer that fails
                    failed[row.number] = error
                    break
                if events[-1].ended or token != guess:
                    break
            row_events.append(events)
        accepted = np.zeros(rows[-1].number + 1 - rows[0].number, np.int64)
        accepted[[row.number - rows[0].number for row in rows]] = [len(events) for events in row_events]
        self.model.accept(accepted)  # before an answer that ended is kept
        hits = [max(len(events) - 1, 0) for events in row_events]
        speculation.guessed(time.perf_counter() - begun, [len(tokens) - 1 for tokens in last], hits)
        for row, events in zip(rows, row_events, strict=True):
            for event in events:
                self._emit(row, event)
            if row.number in failed:
                self._end(row, failed[row.number])

    def _call(
        self, rows: list[Row], tokens: Sequence[Sequence[int]], feed: Callable[..., np.ndarray]
    ) -> list[np.ndarray] | None:
        """Results of `feed` by row; None if the call failed, which ends their requests."""
        # A call spans the rows from the first to the last of `rows`. A failed call may leave their states half written, but no others.
        first = rows[0].number
        ids = np.zeros((rows[-1].number + 1 - first, max(map(len, tokens))), np.int64)
        counts = np.zeros(len(ids), np.int64)
        for row, piece in zip(rows, tokens, strict=True):
            ids[row.number - first, : len(piece)], counts[row.number - first] = piece, len(piece)
        try:
            found = feed(ids, counts, first)
        except Exception as error:  # of any runtime; other requests go on
            self._fail(rows, error)
            return None
        self.broken = ""
        return [found[row.number - first] for row in rows]

    def _fail(self, rows: list[Row], error: BaseException) -> None:
        self.broken = " ".join(str(error).split()) or type(error).__name__
        print(f"a call failed: {self.broken}", file=sys.stderr)
        for row in rows:
            self._end(row, RunError("the model failed on this request."))

    def _end(self, row: Row, why: RunError) -> None:
        """End the request of a row with an error; its state is not used again."""
        self._free(row, lost=True)
        self._finish(row.request, Event("", "invalid" if isinstance(why, GrammarError) else "failed", str(why)))

    def _choose(self, row: Row, found: np.ndarray, greedy: bool = False) -> None:
        """Send the next token of a row; if its logits are not finite, end its request alone."""
        try:
            event = self._event(row, row.token(found, greedy))
        except RunError as error:  # logits that are not finite, a grammar without a next token, a tokenizer that fails
            self._end(row, error)
        else:
            self._emit(row, event)

    def _event(self, row: Row, token: int) -> Event:
        if row.guesser is not None:
            row.guesser.extend([token])
        return row.say(token, () if row.request.ignore_eos else self._ends)

    def _emit(self, row: Row, event: Event) -> None:
        if event.ended:
            self._rows.keep(row, lasting=True)
            self._free(row)
            self._finish(row.request, event)
        elif event.text or event.logprobs:
            row.request.listener(event)

    def _finish(self, request: Request, event: Event) -> None:
        request.done = time.perf_counter()
        request.listener(event)

    def _free(self, row: Row, lost: bool = False) -> None:
        self._rows.free(row, lost)
        if row in self._readers:
            self._readers.remove(row)
        for follower in [other for other in self._rows if other.leader is row]:
            self._line_up(follower)
