"""How long tests take, in seconds of a processor: who comes first where tests run side by side, and what `--write-durations` records.

tests/durations.json has a number for each file. Two processes that share the files out, the longest first, end at nearly the same time.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
UNKNOWN_S = 0.05
"""Of a test in a file that has no number yet."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of a run of all tests."""
    parser.addoption(
        "--write-durations", action="store_true", help=f"record what tests take in {FILE.name}; the slowest are printed"
    )


def processor_s() -> float:
    """Of this process and of those that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file."""
    known: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    took: dict[str, float] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        took[file] = known[file] if file in known else took.get(file, 0) + UNKNOWN_S
    items.sort(key=lambda item: -took[item.nodeid.partition("::")[0]])


class Durations:
    """Measures each phase of each test, and adds them up where reports arrive."""

    def __init__(self) -> None:
        self.since, self.took = processor_s(), dict[str, float]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """A worker sends it with the report."""
        report = yield
        now = processor_s()
        report.processor_s, self.since = now - self.since, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of any process."""
        self.took[report.nodeid] = self.took.get(report.nodeid, 0) + getattr(report, "processor_s", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Write the file; list the slowest."""
        if not config.getoption("write_durations"):
            return
        terminalreporter.section("slowest 60 tests, seconds of a processor")
        for name, seconds in sorted(self.took.items(), key=lambda each: -each[1])[:60]:
            terminalreporter.line(f"{seconds:7.1f}  {name}")
        files: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
        ran = {name.partition("::")[0] for name in self.took}
        files = {file: seconds for file, seconds in files.items() if file not in ran and Path(file).exists()}
        for name, seconds in self.took.items():
            file = name.partition("::")[0]
            files[file] = files.get(file, 0) + seconds
        lines = [
            f"{json.dumps(file)}: {seconds:.1f}" for file, seconds in sorted(files.items(), key=lambda each: -each[1])
        ]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        terminalreporter.line(f"{sum(self.took.values()):7.1f}  together; written to {FILE}")
