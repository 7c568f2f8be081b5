"""Runs verbs in forked processes: what costs seconds to import is imported once, and what dies takes nothing with it."""

import contextlib
import importlib
import os
import pkgutil
import re
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass

DOTS = re.compile(r" \.+ \d+ s$")
"""How a line of progress ends."""
MEMORY_BYTES = 12 << 30
"""Address space of a process: a damaged size must not take the machine's memory."""


@dataclass
class Ended:
    """How a process ended: its exit code, negative for a signal, None where it ran too long; and what it said on stderr."""

    code: int | None
    stderr: str
    seconds: float

    @property
    def kind(self) -> str:
        """One of: timeout, signal, traceback, unexpected (caught at the door only), several lines, refused, answered."""
        lines = [line for line in self.stderr.splitlines() if line.strip() and not _is_noise(line)]
        if self.code is None:
            return "timeout"
        if self.code < 0:
            return "signal"
        if "Traceback (most recent call last)" in self.stderr:
            return "traceback"
        if self.code == 2 and lines and lines[-1].startswith("Unexpected:"):
            return "unexpected"
        if self.code == 2:
            return "refused" if len(lines) == 1 else "several lines"
        return "answered" if self.code in (0, 1) else "other code"

    @property
    def said(self) -> str:
        lines = [line for line in self.stderr.splitlines() if line.strip() and not _is_noise(line)]
        return lines[-1] if lines else ""


def _is_noise(line: str) -> bool:
    """Warnings of libraries, usage, timings, progress, and where a native kernel stays out: no error message."""
    line = re.sub("\x1b\\[[0-9;]*m", "", line)
    return not line.strip() or (
        "Warning" in line
        or DOTS.search(line) is not None
        or line.startswith(
            (
                "[",
                "  warn",
                "usage:",
                "Usage:",
                "Try ",
                "╭",
                "│",
                "╰",
                "the native kernel",
                "Unrecognized keys",
                "--no-check:",
            )
        )
        or "[E:onnxruntime" in line
        or "[W:onnxruntime" in line
    )


def preload() -> None:
    # Exports in this process ask torch for a GPU. A driver that was started before a fork kills who asks it again behind the fork; this
    # question does not start it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors.torch",
        "onnx",
        "onnxscript",
        "onnx_ir",
        "onnxruntime",
        "polygraphy.comparator",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import still_export

    for module in pkgutil.walk_packages(still_export.__path__, "still_export."):
        if module.name.endswith(".preload"):  # closes the output of the process that imports it
            continue
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)


def run(arguments: list[str], limit_s: float = 90.0) -> Ended:
    """Run the command line, or run_ort.py where that is the first argument, in a forked process."""
    read, write = os.pipe()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(read)
        be_the_program(arguments, write)
    os.close(write)
    said = bytearray()
    code: int | None = None
    os.set_blocking(read, False)
    while True:
        with contextlib.suppress(BlockingIOError):
            while block := os.read(read, 1 << 16):
                said += block
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() - begin > limit_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.002)
    with contextlib.suppress(BlockingIOError):
        while block := os.read(read, 1 << 16):
            said += block
    os.close(read)
    return Ended(code, said.decode("utf-8", "replace"), time.monotonic() - begin)


def be_the_program(arguments: list[str], write: int) -> None:
    """In the child: become the program, and never return."""
    code = 70
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(write, 2)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, "w" if i else "r") for i in range(3))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            if arguments[0] == "run_ort.py":
                sys.argv = arguments
                from still_export.runtime import ort

                sys.exit(ort.main())
            else:
                from still_export.cli.main import main

                main(arguments)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
    finally:
        os._exit(code)
