"""The thread that opens a model and steps its scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from still_export.package.refusals import CheckError
from still_export.serving.requests import Request
from still_export.serving.scheduler import Scheduler

CHECK_S = 1.0
"""Seconds between checks of the model's files."""

PAUSE_S = 1.0
"""Longest sleep without requests; a new one ends it."""


class Worker:
    """Steps a scheduler in a thread, which also opens the model, because a CUDA context belongs to its thread.

    Raises:
        Exception: What `open_scheduler` raised.
    """

    def __init__(self, open_scheduler: Callable[[], Scheduler]) -> None:
        self._open = open_scheduler
        self._wake, self._ready = threading.Event(), threading.Event()
        self._ending = False
        self._moved = time.monotonic()
        self._scheduler: Scheduler | None = None
        self._error: BaseException | None = None
        self.failure: CheckError | None = None
        """Why the thread ended by itself."""
        self._thread = threading.Thread(target=self._run, name="still-export model", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None  # or the constructor raised
        return self._scheduler

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds since the running call of the model began; 0 without requests."""
        return 0.0 if self.scheduler.idle else time.monotonic() - self._moved

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self._wake.set()

    def cancel(self, request: Request) -> None:
        self.scheduler.cancel(request)
        self._wake.set()

    def stop(self) -> None:
        """Refuse new requests; the thread ends after the running ones."""
        self.scheduler.stop()
        self._ending = True
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            scheduler = self._scheduler = self._open()
        except BaseException as error:  # raised again in the caller of the constructor
            self._error = error
            return
        finally:
            self._ready.set()
        checked = time.monotonic()
        while True:
            if time.monotonic() - checked >= CHECK_S:
                checked = time.monotonic()
                try:
                    scheduler.model.check_files()
                except CheckError as error:
                    self.failure = error
                    scheduler.give_up(error)
                    return
            self._wake.clear()  # before the step, which sees requests submitted until then
            self._moved = time.monotonic()
            if not scheduler.step():
                if self._ending:
                    return
                self._wake.wait(PAUSE_S)
