"""How a command ends early: one line on stderr; Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console

LOST_PAGES = (
    b"LostPages: a file was cut while it was read, such as a model's or package's weights, or its disk failed. Copy or export it again, "
    b"and start again.\n"
)
_on_lost_pages: object = None  # which the system calls: kept from being freed

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


def end_at_lost_pages() -> None:
    """End with a sentence where a file is cut that is mapped: reading the lost pages raises SIGBUS, for which Python's own handlers would
    never run."""

    def end(number: int) -> None:
        os.write(2, LOST_PAGES)
        os._exit(2)

    global _on_lost_pages
    _on_lost_pages = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    ctypes.CDLL(None).signal(signal.SIGBUS, _on_lost_pages)


def complain_interrupted() -> None:
    """What is said when Ctrl-C or SIGTERM ended the command."""
    complain("Interrupted", "nothing half-written was left behind.")


def complain(name: str, message: str) -> None:
    """Print an error in one line on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{name}:[/] ", end="")
    print(message, file=sys.stderr)
