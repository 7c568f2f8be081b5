"""Output of verbs: results on stdout, progress on stderr."""

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
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from still_export.cli.dots import Dots
from still_export.errors import ConfigError
from still_export.package.refusals import printable


def next_commands(package: Path, target: str, ready: bool = True) -> str:
    """The line with the next commands for a package; `ready`: complete, with engines if its target has them."""
    from still_export.targets.registry import target_of

    if not ready:
        return f"next: still-export build {shlex.quote(str(package))}"
    if target_of(target).runtime is None:
        return f"next: load the engine with {target}'s own API; docs/reference/runtimes.md has its inputs and outputs"
    shown = shlex.quote(str(package))
    prompt = '--prompt "..."' if (package / "tokenizer.json").is_file() else "--prompt-ids 1,2,3"
    return f"next: still-export run {shown} {prompt}   or   still-export verify {shown}"


PackageFolder = Annotated[Path, typer.Argument(help="Package folder.")]
"""Argument of verbs that read packages."""

TrustNative = Annotated[
    bool,
    typer.Option(
        "--trust-native", help="Load native code of the package that was not built on this machine, and remember it."
    ),
]
"""Flag of verbs that run packages."""


def _writable_report(path: Path | None) -> Path | None:
    """Check `path` while flags are parsed, before the verb's work."""
    if path is not None:
        from still_export.report.render import check_report

        check_report(path)
    return path


ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        callback=_writable_report,
        help="Also write this HTML file: one page of 1 MB with tables and plots.",
    ),
]
"""Flag of verbs with a report."""

LOADING = "loading PyTorch and its libraries, slowly the first time"
LONG_PROMPT = 1024
"""Tokens of a prompt from which reading shows a bar."""


def report_folder(folder: Path) -> Path:
    """Create `folder` for results, before the work begins.

    Raises:
        ConfigError: It cannot be created or written, as in a package on a read-only disk.
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
    return shlex.join(["still-export", *sys.argv[1:]])


NAMED = TextColumn("{task.description}")
COUNTED = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class Output:
    """Prints a verb's results and progress according to --json and --quiet. In a distributed run only the first process prints."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.first = os.environ.get("RANK", "0") == "0"  # set by torchrun and accelerate
        self.as_json = as_json
        self.quiet = quiet or not self.first
        self.errors = Console(stderr=True, highlight=False)
        self._dots: Dots | None = None

    def result(self, content: dict[str, Any], *lines: str) -> None:
        """Print `content` with --json, else `lines`."""
        if not self.first:
            return
        if self._dots is not None:
            self._dots.end_line()
        if self.as_json:
            print(json.dumps(content, indent=1, default=str))
        else:
            print(printable("\n".join(lines)))

    def log(self, line: str) -> None:
        """Print to stderr unless quiet."""
        if not self.quiet:
            self.say(line)

    def say(self, text: str) -> None:
        """Print to stderr, even if quiet."""
        print(printable(text), file=sys.stderr)

    @contextlib.contextmanager
    def _log_file(self, step: str) -> Iterator[Dots]:
        """Dots during `step` and the steps after it; other output gets its own lines."""
        with Dots() as dots:
            self._dots = dots
            dots.step(step)
            try:
                yield dots
            finally:
                self._dots = None

    @contextlib.contextmanager
    def _shown(self, begin: str, *columns: ProgressColumn, transient: bool = False) -> Iterator[Dots | Progress | None]:
        """Bars on a terminal, dots from `begin` on in a log file, None with --quiet."""
        if self.quiet:
            yield None
        elif not self.errors.is_terminal:
            with self._log_file(begin) as dots:
                yield dots
        else:
            with Progress(*columns, console=self.errors, transient=transient) as progress:
                yield progress

    @contextlib.contextmanager
    def steps(self) -> Iterator[Callable[..., None]]:
        """A spinner with the name of the current step; a step that counts bytes gets a bar."""
        size = TextColumn("{task.fields[size]}")
        with self._shown("starting", SpinnerColumn(), NAMED, BarColumn(), size, TimeElapsedColumn()) as shown:
            task = shown.add_task("starting", total=None, size="") if isinstance(shown, Progress) else None

            def update(step: str, done: int = 0, total: int = 0) -> None:
                if isinstance(shown, Dots):
                    shown.step(step)
                elif shown is not None and task is not None:
                    size = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else ""
                    shown.update(task, description=step, completed=done, total=total or None, size=size)

            yield update

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner while `what` is done."""
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
        """A bar while a prompt of about `tokens` tokens is read; none for a short one."""
        if tokens < LONG_PROMPT:
            yield lambda done, total: None
            return
        with self._shown("reading the prompt", TextColumn("reading"), *COUNTED, transient=True) as shown:
            task = shown.add_task("reading", total=tokens) if isinstance(shown, Progress) else None

            def advance(done: int, total: int) -> None:
                if isinstance(shown, Progress) and task is not None:
                    shown.update(task, completed=done, total=total)
                if shown is not None and done == total:
                    shown.step("") if isinstance(shown, Dots) else shown.stop()

            yield advance

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar that advances by one with each call; the argument names what was done."""
        with self._shown(what, NAMED, *COUNTED) as shown:
            task = shown.add_task(what, total=total) if isinstance(shown, Progress) else None
            steps = itertools.count(1)

            def advance(done: str) -> None:
                if isinstance(shown, Dots):
                    shown.step(f"{what}: {next(steps)} of {total}, {done}")
                elif shown is not None and task is not None:
                    shown.update(task, advance=1, description=f"{what}: {done}")

            yield advance

    @contextlib.contextmanager
    def phases(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar for each phase, called with (phase, done, total); in a log file a line for each phase."""
        known: dict[str, Any] = {}
        with self._shown("loading", NAMED, *COUNTED) as shown:  # of libraries, too, which take seconds
            loading = shown.add_task("loading", total=None) if isinstance(shown, Progress) else None

            def update(phase: str, done: int, total: int) -> None:
                if isinstance(shown, Dots):
                    part = 4 * done // max(total, 1)
                    if known.get(phase) != part:
                        known[phase] = part
                        shown.step(f"{phase}: {done} of {total}" if total else phase, at_once=True)
                elif shown is not None and loading is not None:
                    shown.update(loading, visible=False)
                    if phase not in known:
                        known[phase] = shown.add_task(phase, total=total)
                    shown.update(known[phase], completed=done, total=total)

            yield update

    @contextlib.contextmanager
    def training(self) -> Iterator[Callable[[str, int, int, dict[str, float]], None]]:
        """A bar per stage with its latest measurements and the time left, called with (stage, steps done, steps in all, measurements).

        A log file, where a bar appears only at its end, gets twenty lines per stage.
        """
        known: dict[str, Any] = {}
        columns = (
            NAMED,
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(),
        )
        with self._shown("starting", *columns) as shown:

            def update(stage: str, done: int, total: int, measured: dict[str, float]) -> None:
                text = "  ".join(f"{name} {value:,.4g}" for name, value in measured.items())
                if isinstance(shown, Dots):
                    begin, first = known.setdefault(stage, (time.monotonic(), done))
                    if done % max(1, total // 20) == 0 or done == total:
                        left = (time.monotonic() - begin) / max(1, done - first) * (total - done)
                        shown.step(f"{stage} {done}/{total}  {text}  {left:,.0f} s left", at_once=True)
                elif shown is not None:
                    if stage not in known:
                        known[stage] = shown.add_task(stage, total=total, measured="")
                    shown.update(known[stage], completed=done, measured=text)

            yield update
