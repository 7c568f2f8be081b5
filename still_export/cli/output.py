"""What verbs print: results on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from still_export.cli.dots import Dots
from still_export.errors import ConfigError


def next_commands(package: Path, target: str, ready: bool = True) -> str:
    """The line that lists what can be done with a package for `target`; `ready`: its engines, if any, are built."""
    from still_export.targets.registry import target_of

    if not ready:
        return f"next: still-export build {shlex.quote(str(package))}"
    if target_of(target).runtime is None:
        return f"next: load the engine with {target}'s own API; docs/reference/runtimes.md has its inputs and outputs"
    shown = shlex.quote(str(package))
    return f'next: still-export run {shown} --prompt "..."   or   still-export verify {shown}'


PackageFolder = Annotated[Path, typer.Argument(help="Package folder.")]
"""Argument of the verbs that read packages."""

TrustNative = Annotated[
    bool,
    typer.Option(
        "--trust-native", help="Load native code of the package that this machine did not build, and remember it."
    ),
]
"""Flag of the verbs that run packages."""


def _writable_report(path: Path | None) -> Path | None:
    """Check while flags are parsed, before the verb's work, that `path` can be written."""
    if path is not None:
        from still_export.report.render import check_report

        check_report(path)
    return path


ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        callback=_writable_report,
        help="Also write this HTML file, to look at: one file of 1 MB with tables and plots.",
    ),
]
"""Flag of the verbs whose results can be looked at."""

LOADING = "loading PyTorch and its libraries, slowly the first time"
LONG_PROMPT = 1024
"""Prompt length from which a bar is shown."""


def report_folder(folder: Path) -> Path:
    """Create `folder` before the work whose results go there.

    Raises:
        ConfigError: It cannot be made or written, as in a package on a read-only disk.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK) else "no permission, or a read-only disk"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ConfigError(f"cannot write results into {folder}: {reason}. Choose another folder with -o.")
    return folder


def command_line() -> str:
    """The command that was typed."""
    return shlex.join(["still-export", *sys.argv[1:]])


class Output:
    """Prints results and progress as --json and --quiet say; of several processes only the first prints."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.first = os.environ.get("RANK", "0") == "0"  # torchrun's and accelerate's
        self.as_json = as_json
        self.quiet = quiet or not self.first
        self.errors = Console(stderr=True, highlight=False)
        self._dots: Dots | None = None

    def result(self, content: dict[str, Any], *lines: str) -> None:
        """Print `content` with --json, else `lines`."""
        if not self.first:
            return
        self._end_line()
        if self.as_json:
            print(json.dumps(content, indent=1, default=str))
        else:
            print("\n".join(lines))

    def log(self, line: str) -> None:
        """Print to stderr unless quiet."""
        if not self.quiet:
            self.say(line)

    def say(self, text: str) -> None:
        """Print to stderr, even if quiet: the answer to a question."""
        self._end_line()
        print(text, file=sys.stderr)

    def _end_line(self) -> None:
        if self._dots is not None:
            self._dots.end_line()

    @contextlib.contextmanager
    def _log_file(self, step: str) -> Iterator[Dots]:
        """Dots while `step` and the steps after it run; other output gets lines of its own."""
        with Dots() as dots:
            self._dots = dots
            dots.step(step)
            try:
                yield dots
            finally:
                self._dots = None

    @contextlib.contextmanager
    def steps(self) -> Iterator[Callable[..., None]]:
        """A spinner with the current step; a step that counts bytes is a bar."""
        if self.quiet:
            yield lambda step, done=0, total=0: None
            return
        if not self.errors.is_terminal:
            with self._log_file("starting") as dots:
                yield lambda step, done=0, total=0: dots.step(step)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.errors) as progress:
            task = progress.add_task("starting", total=None, size="")

            def update(step: str, done: int = 0, total: int = 0) -> None:
                size = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else ""
                progress.update(task, description=step, completed=done, total=total or None, size=size)

            yield update

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner next to `what` while the block runs."""
        if self.quiet:
            yield
            return
        shown: contextlib.AbstractContextManager[Any] = self._log_file(what)
        if self.errors.is_terminal:
            shown = self.errors.status(what)
        with shown:
            yield

    @contextlib.contextmanager
    def reading(self, tokens: int) -> Iterator[Callable[[int, int], None]]:
        """A bar over a prompt of about `tokens` tokens, removed at its end; none for a short prompt."""
        if self.quiet or tokens < LONG_PROMPT:
            yield lambda done, total: None
            return
        if not self.errors.is_terminal:
            with self._log_file("reading the prompt") as dots:
                yield lambda done, total: dots.step("") if done == total else None
            return
        columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.errors, transient=True) as progress:
            task = progress.add_task("reading", total=tokens)

            def advance(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)
                if done == total:
                    progress.stop()

            yield advance

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar that advances by one with each call, which names what was done."""
        if self.quiet:
            yield lambda done: None
            return
        if not self.errors.is_terminal:
            with self._log_file(what) as dots:
                steps = itertools.count(1)
                yield lambda done: dots.step(f"{what}: {next(steps)} of {total}, {done}")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.errors) as progress:
            task = progress.add_task(what, total=total)

            def advance(done: str) -> None:
                progress.update(task, advance=1, description=f"{what}: {done}")

            yield advance

    @contextlib.contextmanager
    def phases(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar for each phase, called with (name, done, total); in a log file a line for each phase."""
        if self.quiet:
            yield lambda phase, done, total: None
            return
        known: dict[str, Any] = {}
        if not self.errors.is_terminal:

            def line(phase: str, done: int, total: int) -> None:
                part = 4 * done // max(total, 1)
                if known.get(phase) != part:
                    known[phase] = part
                    dots.step(f"{phase}: {done} of {total}", at_once=True)

            with self._log_file("loading") as dots:  # of libraries, too, which take seconds
                yield line
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.errors) as progress:
            loading = progress.add_task("loading", total=None)  # of libraries, too, which take seconds

            def update(phase: str, done: int, total: int) -> None:
                progress.update(loading, visible=False)
                if phase not in known:
                    known[phase] = progress.add_task(phase, total=total)
                progress.update(known[phase], completed=done, total=total)

            yield update

    @contextlib.contextmanager
    def training(self) -> Iterator[Callable[[str, int, int, dict[str, float]], None]]:
        """A bar per stage with newest measurements and time left, called with (stage, steps done, steps in all, measurements).

        In a log file, where a bar shows nothing until its end, twenty lines per stage.
        """
        if self.quiet:
            yield lambda stage, done, total, measured: None
            return

        def text(measured: dict[str, float]) -> str:
            return "  ".join(f"{name} {value:,.4g}" for name, value in measured.items())

        if not self.errors.is_terminal:
            started: dict[str, tuple[float, int]] = {}

            def line(stage: str, done: int, total: int, measured: dict[str, float]) -> None:
                begin, first = started.setdefault(stage, (time.monotonic(), done))
                if done % max(1, total // 20) == 0 or done == total:
                    left = (time.monotonic() - begin) / max(1, done - first) * (total - done)
                    dots.step(f"{stage} {done}/{total}  {text(measured)}  {left:,.0f} s left", at_once=True)

            with self._log_file("starting") as dots:
                yield line
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.errors) as progress:
            tasks: dict[str, Any] = {}

            def update(stage: str, done: int, total: int, measured: dict[str, float]) -> None:
                if stage not in tasks:
                    tasks[stage] = progress.add_task(stage, total=total, measured="")
                progress.update(tasks[stage], completed=done, measured=text(measured))

            yield update
