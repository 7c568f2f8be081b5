"""Progress in a log file, where a bar would stay invisible."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

TICK_S = 2.0


class Dots:
    """Prints a step longer than two seconds on stderr, with a dot every two seconds and the time at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="still-export progress", daemon=True)
        self._step, self._begin = "", 0.0
        self._open = self._dotted = False  # a line of the step, and dots on it

    def __enter__(self) -> Dots:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.end_line()

    def step(self, name: str, at_once: bool = False) -> None:
        """Start a step; `at_once`: print it immediately."""
        with self._lock:
            if name != self._step:
                self._end_line()
                self._step, self._begin = name, time.monotonic()
            if at_once and not self._open:
                self._name()

    def end_line(self) -> None:
        """End an open line of dots before other output."""
        with self._lock:
            self._end_line()

    def _name(self) -> None:
        print(self._step, end="", file=sys.stderr, flush=True)
        self._open, self._dotted = True, False

    def _end_line(self) -> None:
        if self._open:
            print(f" {time.monotonic() - self._begin:.0f} s" if self._dotted else "", file=sys.stderr, flush=True)
            self._open = False

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                if not self._step:
                    continue
                if not self._open:
                    self._name()
                print("." if self._dotted else " .", end="", file=sys.stderr, flush=True)
                self._dotted = True
