"""The rows of the batch: their requests, the tokens that their states have read, and the states cached for later requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from still_export.runtime.base import Runner
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.text import Text
from still_export.serving.requests import Request, Row

IDLE_TOKENS = 2048
"""Room that an idle model keeps, because growing again copies."""

IDLE_S = 30.0
"""How long an idle model keeps more room, for the next turn of a conversation."""

LEAST_FORK = 16
"""A state is cached where two prompts diverge if they share at least so many tokens beyond the cached ones; fewer are cheaper to read."""


class Rows:
    """Rows in use by requests, and states that earlier requests left in free rows.

    Args:
        prefixes: Cache of the states of prompts and answers; None: every prompt is read from its beginning.
        grid: States are cached only at multiples of so many tokens of prompts; 0: everywhere.
    """

    def __init__(self, model: Runner, rows: int, prefixes: PrefixCache | None, grid: int) -> None:
        self.model, self.prefixes, self.grid = model, prefixes, grid
        self._rows: list[Row | None] = [None] * rows
        self._left_at = [0.0] * rows
        self._start()

    def _start(self) -> None:
        self.model.start(len(self._rows))
        # What the states in free rows have read, with the scope of the request.
        self._left: list[tuple[tuple[int, ...] | None, list[int]]] = [(None, []) for _ in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        """Those that requests have."""
        return (row for row in self._rows if row is not None)

    def __contains__(self, row: Row) -> bool:
        return self._rows[row.number] is row

    @property
    def running(self) -> int:
        return sum(1 for _ in self)

    def shrink(self) -> None:
        """Free memory that no request has used for IDLE_S."""
        if self.model.room > IDLE_TOKENS and time.perf_counter() - max(self._left_at) > IDLE_S:
            self._start()

    def take(self, request: Request, text: Text) -> Row:
        """Choose a free row: the one that has read most of the prompt, then the least recently used, then the lowest. A call spans all rows
        from its first to its last, so low numbers are cheaper."""
        free = [number for number, row in enumerate(self._rows) if row is None]
        number = max(free, key=lambda n: (self._has_read(n, request), -self._left_at[n]))
        row = self._rows[number] = Row(number, request, text)
        return row

    def begin(self, row: Row) -> None:
        """Start a row after the longest known prefix of its prompt."""
        request, scope = row.request, row.request.scope
        row.read = self._has_read(row.number, request)
        found = [self.prefixes.find([*s, *request.prompt]) for s in {scope or (), ()}] if self.prefixes else []
        cached = max(filter(None, found), key=lambda prefix: prefix.length, default=None)
        if self.prefixes and cached and cached.length > row.read:
            self.model.put(row.number, self.prefixes.state(cached), cached.length)
            row.read = cached.length
        elif not row.read:
            self.model.forget(row.number)
        if self.prefixes:
            request.cached = row.read
            if scope is not None:
                fork = self.prefixes.known([*scope, *request.prompt]) - len(scope)
                row.stops.add(self.on_grid(fork) if fork - row.read >= LEAST_FORK else 0)
            self.prefixes.prompt_tokens += len(request.prompt)
            self.prefixes.hit_tokens += row.read

    def follow(self, row: Row, leader: Row) -> None:
        """Continue `row` after what `leader` has read, which is a beginning of its prompt."""
        self.model.put(row.number, self.model.take(leader.number), leader.read)
        if self.prefixes:
            self.prefixes.hit_tokens += leader.read - row.read
        row.read = row.request.cached = leader.read

    def free(self, row: Row, lost: bool = False) -> None:
        """Free a row; `lost`: its state is unusable."""
        self._rows[row.number] = None
        if self.prefixes:
            read = self._read_by(row) if not self.grid or self._bare(row) else []
            self._left[row.number], self._left_at[row.number] = (row.request.scope, read), time.perf_counter()
        if lost:
            self._left[row.number] = (None, [])

    def keep(self, row: Row, lasting: bool = False) -> None:
        """Cache the state after all tokens that the row has read; with a grid, only states at grid points of the prompt."""
        scope = row.request.scope
        if not self.prefixes or scope is None:
            return
        read = self._read_by(row)
        if self.grid:
            if not self._bare(row):
                return
            lasting = len(read) == self.on_grid(len(row.request.prompt))
        try:
            self.prefixes.keep([*scope, *read], self.model.take(row.number), len(read), lasting and not scope)
        except MemoryError:
            print("memory is full: the prefix cache is emptied. Give it less: --prefix-cache", file=sys.stderr)
            self.prefixes.clear()

    def on_grid(self, tokens: int) -> int:
        """The last place up to `tokens` where states may be cached."""
        return tokens // self.grid * self.grid if self.grid else tokens

    def _has_read(self, number: int, request: Request) -> int:
        """How much of a prompt the state that was left in a free row has read."""
        scope, left = self._left[number]
        if scope is None or scope != request.scope:
            return 0
        return len(left) if len(left) < len(request.prompt) and list(request.prompt[: len(left)]) == left else 0

    def _read_by(self, row: Row) -> list[int]:
        return [*row.request.prompt, *row.request.tokens][: int(self.model.length[row.number])]

    def _bare(self, row: Row) -> bool:
        """The row has read the beginning of a prompt alone, which ends on the grid."""
        read = int(self.model.length[row.number])
        return read == row.read == self.on_grid(read)
