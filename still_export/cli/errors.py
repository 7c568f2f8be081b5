"""How a command ends early: one line on stderr; Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def ended_at_once(undo: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process where it is, after `undo`.

    For TensorRT: what signal handlers raise in its callbacks is lost, and it works on for minutes.
    """

    def end(*_: object) -> None:
        undo()
        complain_interrupted()
        sys.stderr.flush()
        os._exit(2)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, end) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def complain_interrupted() -> None:
    """What is said when Ctrl-C or SIGTERM ended the command."""
    complain("Interrupted", "nothing half-written was left behind.")


def complain(name: str, message: str) -> None:
    """Print an error in one line on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{name}:[/] ", end="")
    print(message, file=sys.stderr)
