"""Progress in a log file, where a bar appears only at its end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TextIO

TICK_S = 2.0


class Dots:
    """Prints on stderr the name of a step that takes over two seconds, a dot every two seconds, and its time at the end.

    Whatever else Python prints on stderr meanwhile gets its own lines.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may print while a dot is printed
        self._stderr = sys.stderr
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="still-export progress", daemon=True)
        self._step, self._begin = "", 0.0
        self._open = self._dotted = False  # whether the step has a line, and dots on it
        self.others_open = False  # whether other output has begun a line

    def __enter__(self) -> Dots:
        self._stderr = sys.stderr
        sys.stderr = _OwnLines(self, self._stderr)  # type: ignore[assignment]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.end_line()
        if isinstance(sys.stderr, _OwnLines) and sys.stderr.dots is self:
            sys.stderr = self._stderr

    def step(self, name: str, at_once: bool = False) -> None:
        """Begin a step; `at_once`: print its name immediately, even if the step is short."""
        with self.lock:
            if name != self._step:
                self._end_line()
                self._step, self._begin = name, time.monotonic()
            if at_once and not self._open:
                self._name()

    def end_line(self) -> None:
        """End the line of dots before other output is printed."""
        with self.lock:
            self._end_line()

    def _name(self) -> None:
        print("\n" * self.others_open + self._step, end="", file=self._stderr, flush=True)
        self.others_open = False
        self._open, self._dotted = True, False

    def _end_line(self) -> None:
        if self._open:
            print(f" {time.monotonic() - self._begin:.0f} s" if self._dotted else "", file=self._stderr, flush=True)
            self._open = False

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            with self.lock:
                if not self._step or self.others_open:
                    continue
                if not self._open:
                    self._name()
                print("." if self._dotted else " .", end="", file=self._stderr, flush=True)
                self._dotted = True


class _OwnLines:
    """A stream that ends the line of dots before anything is written to it."""

    def __init__(self, dots: Dots, stream: TextIO) -> None:
        self.dots, self._stream = dots, stream

    def write(self, text: str) -> int:
        with self.dots.lock:
            self.dots.end_line()
            self.dots.others_open = not text.endswith("\n") if text else self.dots.others_open
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
