"""TensorRT's build log in a file, and its progress as steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

Progress = Callable[[str], None]


def file_logger(module: Any, log: IO[str], errors: list[str]) -> Any:
    """A logger of TensorRT's `module` that writes all but verbose messages to `log` and collects `errors`."""

    class FileLogger(module.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            name = str(severity).rsplit(".", 1)[-1]
            if not log.closed and name != "VERBOSE":
                log.write(f"{time.strftime('%H:%M:%S')} {name:8} {message}\n")
                log.flush()
            if name in ("ERROR", "INTERNAL_ERROR"):
                errors.append(message)

    return FileLogger()


def progress_monitor(module: Any, say: Progress) -> Any:
    """A progress monitor of TensorRT's `module` that reports the outermost phase and its step."""

    class Monitor(module.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.steps[name] = steps

        def step_complete(self, name: str, step: int) -> bool:
            if name in self.steps:
                say(f"building the engine: {name}, {step + 1} of {self.steps[name]}")
            return True

        def phase_finish(self, name: str) -> None:
            self.steps.pop(name, None)

    return Monitor()
