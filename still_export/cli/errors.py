"""Early ends of a command: errors as one line on stderr that begins with the typed words; Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import typer
from rich.console import Console

from still_export.package.refusals import printable

LOST_PAGES = (
    b"LostPages: a file was cut while it was read, such as a model's or package's weights, or its disk failed. Copy or export it again, "
    b"and start again.\n"
)
_on_lost_pages: object = None  # the system calls it, so it must not be freed

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
USAGE: type[Exception] = typer.BadParameter.__mro__[1]
"""Raised by typer for wrong flags or arguments."""
_COMMAND = re.compile(r"still-export |pip install |Run: |Type: |--force")
"""Matches messages that already end with a command to type."""
_AGAIN = re.compile(r"[Ee]xport (?:it |the model )?(?:again )?with (?:a larger )?(--[a-z-]+)\b(?! a model)")


@contextlib.contextmanager
def ended_at_once(undo: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process immediately, after `undo`.

    For TensorRT: exceptions of signal handlers are lost in its callbacks, and it would go on for minutes.
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
    """End with one line if a mapped file is truncated. Reading a lost page raises SIGBUS, for which Python's own handlers never run."""

    def end(number: int) -> None:
        os.write(2, LOST_PAGES)
        os._exit(2)

    global _on_lost_pages
    _on_lost_pages = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    ctypes.CDLL(None).signal(signal.SIGBUS, _on_lost_pages)


def stopping_behind_steps(progress: Callable[..., None], stop: type[BaseException]) -> Callable[..., None]:
    """Wrap the `progress` of a training (stage, steps done, steps in all, measurements): after Ctrl-C or SIGTERM it raises `stop` at the
    end of the step. A second signal, and any before the first step or after the last, ends the process at once."""
    before: dict[signal.Signals, object] = {}
    stopping = False

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        before.clear()

    def on_signal(*_: object) -> None:
        nonlocal stopping
        stopping = True
        restore()
        print("stopping after this step, with a checkpoint; once more: at once", file=sys.stderr)

    def reported(stage: str, done: int, total: int, measured: dict[str, float]) -> None:
        if done == total:
            restore()
        elif not before and not stopping and threading.current_thread() is threading.main_thread():
            before.update({number: signal.signal(number, on_signal) for number in INTERRUPTS})
        progress(stage, done, total, measured)
        if stopping:
            raise stop

    return reported


def complain_interrupted() -> None:
    complain("Interrupted", "nothing half-written was left behind.")


def complain(name: str, message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{name}:[/] ", end="")
    print(printable(message), file=sys.stderr)


def as_typed(message: str, kind: str, argv: Sequence[str]) -> str:
    """Add the typed verb and folder before `message`, unless it names the folder, and a command to type after it, unless it has one."""
    verb, subject = argv[0], next((word for word in argv[1:2] if not word.startswith("-")), "")
    begin = "" if subject and subject in message else f"{verb} {subject}".rstrip() + ": "
    end = ""
    if not _COMMAND.search(message):
        manifest = os.path.join(subject, "manifest.json")
        if (again := _AGAIN.search(message)) and subject and os.path.isfile(manifest):
            end = f" Type: still-export export --config {shlex.quote(manifest)} {again[1]} ... -o OTHER"
        elif kind == "ConfigError":
            end = f" All flags: still-export {verb} -h"
        elif kind == "UnsupportedModelError" and verb != "inspect":
            end = f" What is known of it: still-export inspect {shlex.quote(subject)}"
    return f"{begin}{message}{end}"


def usage(error: Exception, argv: Sequence[str]) -> str:
    """A typer error as one sentence that begins with the typed flag and value."""
    parameter = getattr(error, "param", None)
    names = tuple(getattr(parameter, "opts", ())) or (getattr(error, "option_name", ""),)
    typed = ""
    for at, word in enumerate(argv):
        name, joined, value = word.partition("=")
        if name in names and name.startswith("-"):
            typed = f"{name} {value if joined else next(iter(argv[at + 1 :]), '')}".rstrip()
    message = str(getattr(error, "message", error))
    if parameter is None or not message:
        message = error.format_message() if hasattr(error, "format_message") else message
    message = message.removeprefix("Invalid value: ").removeprefix("Value error, ").rstrip(".")
    for pattern, plain in _PLAIN:
        message = re.sub(pattern, plain, message)
    return f"{typed}: {message}." if typed and not message.startswith(names) and typed not in message else f"{message}."


_PLAIN = (
    (r"^Input should be a valid integer.*", "give a whole number"),
    (r"^Input should be a valid number.*", "give a number"),
    (r"^Input should be ", "it must be "),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    (r"^No such option: (\S+) \(Possible options: (.+)\)", r"\1 is no flag here; near it: \2"),
    (r"^No such option: (\S+)", r"\1 is no flag here"),
    (r"^Option '(\S+)' requires an argument", r"\1 needs a value"),
    (r"^Got unexpected extra arguments?(?:\(s\))? \((.+)\)", r"\1: one word too many, or a flag is missing before it"),
)
"""Messages of typer and pydantic, and their replacements."""
