"""Requests that wait for a row, and those that their clients gave up."""

from __future__ import annotations

import threading
import time
from collections import deque

from still_export.runtime.sampling import RunError
from still_export.serving.requests import Request

STOPPING = "the server is stopping. Ask another one, or later."


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
        """The request that came first."""
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
