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


def stopping_behind_steps(progress: Callable[..., None], stop: type[BaseException]) -> Callable[..., None]:
    """`progress` of a training (stage, steps done, steps in all, measurements) that raises `stop` behind the step in which Ctrl-C or
    SIGTERM came. A second one ends the process at once, as both do before the first step and behind the last."""
    before: dict[signal.Signals, object] = {}
    asked = False

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        before.clear()

    def on_signal(*_: object) -> None:
        nonlocal asked
        asked = True
        restore()
        print("stopping behind this step, with a checkpoint; once more: at once", file=sys.stderr)

    def reported(stage: str, done: int, total: int, measured: dict[str, float]) -> None:
        if done == total:
            restore()
        elif not before and not asked and threading.current_thread() is threading.main_thread():
            before.update({number: signal.signal(number, on_signal) for number in INTERRUPTS})
        progress(stage, done, total, measured)
        if asked:
            raise stop

    return reported


def complain_interrupted() -> None:
    """What is said when Ctrl-C or SIGTERM ended the command."""
    complain("Interrupted", "nothing half-written was left behind.")


def complain(name: str, message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{name}:[/] ", end="")
    print(message, file=sys.stderr)
