"""Connections of the server, with limits, so that slow or numerous clients cannot block others."""

from __future__ import annotations

import asyncio
import errno
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SPARE_DESCRIPTORS = 64
"""File descriptors reserved for the rest of the process."""

QUEUE = 512
"""Connections that wait in the kernel until the event loop accepts them."""

ACCEPTED = 16
"""Connections that the event loop accepts in one round. It sets them up in later rounds, when others are closed for them."""

ROUNDS = 4


@dataclass
class Connections:
    """Limits for all connections of a server. The process raises its limit of descriptors where the system allows it.

    Args:
        most: Most connections at a time. One more closes the one that has been waiting longest without a request.
        head_s: Time from the beginning of a connection, or its last answer, to a request with all headers.
        write_s: Time after which a client that stopped reading is disconnected.

    Attributes:
        waiting: Connections without a request, the oldest first.
    """

    most: int = 1000
    head_s: float = 10.0
    write_s: float = 60.0
    waiting: dict[Connection, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            import resource
        except ImportError:  # Windows
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        others = ROUNDS * ACCEPTED + SPARE_DESCRIPTORS
        infinite = resource.RLIM_INFINITY
        if soft != infinite and soft < self.most + others:
            soft = self.most + others if hard == infinite else min(self.most + others, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            self.most = min(self.most, max(1, soft - others))

    def __call__(self, **options: Any) -> Connection:
        """A new connection, called by uvicorn."""
        connection = Connection(**options)
        connection.limits = self
        return connection


class Connection(H11Protocol):
    """An HTTP connection that closes if its client is too slow."""

    limits: Connections
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.limits.most:
            oldest = next(iter(self.limits.waiting))
            oldest._forget()  # otherwise it is the oldest for other connections of this round, too
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()
        self.resume_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch(self) -> None:
        """Start the timeout for a request, unless one is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._head is None:
            self._head = self.loop.call_later(self.limits.head_s, self._end)
            self.limits.waiting[self] = None

    def _end(self) -> None:
        """Close once the client has read everything, or stopped reading."""
        self.transport.close()
        self._abort_unread()

    def _abort_unread(self) -> None:
        self._unread = self._unread or self.loop.call_later(self.limits.write_s, self.transport.abort)

    def _forget(self) -> None:
        self.limits.waiting.pop(self, None)
        if self._head is not None:
            self._head.cancel()
            self._head = None


def report_once(every_s: float = 60.0) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An error handler for an event loop that reports a full table of file descriptors once per `every_s`. The loop retries 512 times a
    second."""
    reported = -every_s

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal reported
        error = context.get("exception")
        full = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        if not isinstance(error, OSError) or error.errno not in full:
            loop.default_exception_handler(context)
        elif time.monotonic() - reported >= every_s:
            reported = time.monotonic()
            print(
                f"new connections wait: {error.strerror}. Raise the limit (ulimit -n) or close others.", file=sys.stderr
            )

    return handle
