"""Progress in a log file, where a bar would show nothing until its end."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

TICK_S = 2.0


class Dots:
    """Names on stderr a step that takes longer than two seconds, with a dot for each two of them and how long it took at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="still-export progress", daemon=True)
        self._step, self._begin, self._open = "", 0.0, False

    def __enter__(self) -> Dots:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.end_line()

    def step(self, name: str) -> None:
        """What is done from now on."""
        with self._lock:
            if name != self._step:
                self._end_line()
                self._step, self._begin = name, time.monotonic()

    def end_line(self) -> None:
        """End the line of dots, if one is open: others print."""
        with self._lock:
            self._end_line()

    def _end_line(self) -> None:
        if self._open:
            self._open = False
            print(f" {time.monotonic() - self._begin:.0f} s", file=sys.stderr, flush=True)

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                if self._step:
                    print("." if self._open else f"{self._step} .", end="", file=sys.stderr, flush=True)
                    self._open = True
