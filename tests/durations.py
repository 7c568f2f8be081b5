"""How long tests take, in seconds of a processor: which come first where tests run side by side, which `--fast` runs, and what
`--write-durations` records.

tests/durations.json has of each file its seconds, and the tests that take more than FAST_S alone, with the fixtures that they share. Two
processes that share the files out, the longest first, end at nearly the same time.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("durations.json")
UNKNOWN_S = 0.05
"""Of a test in a file that has no number yet."""
FAST_S = 0.15
"""Of the tests that `--fast` runs, at most, on average over a function's parameters."""
LEFT = pytest.StashKey[int]()
"""How many tests `--fast` leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of a run of all tests."""
    parser.addoption(
        "--write-durations", action="store_true", help=f"record what tests take in {FILE.name}; the slowest are printed"
    )
    parser.addoption("--fast", action="store_true", help=f"leave out tests of more than {FAST_S} s by {FILE.name}")


_elsewhere = [0.0]


def add_elsewhere(seconds: float) -> None:
    """Count what a server of tests worked for this process: nobody waits for it."""
    _elsewhere[0] += seconds


def processor_s() -> float:
    """Of this process, of those that it waited for, and of servers."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + _elsewhere[0]


@cache
def known() -> dict[str, dict[str, Any]]:
    """By file, `seconds` and the names of `slow` tests."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def function_of(name: str) -> tuple[str, str]:
    """File and function of a test, without its parameters."""
    file, _, test = name.partition("::")
    return file, test.partition("[")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file."""
    took: dict[str, float] = {}
    for item in items:
        file, _ = function_of(item.nodeid)
        took[file] = known()[file]["seconds"] if file in known() else took.get(file, 0) + UNKNOWN_S
    items.sort(key=lambda item: -took[function_of(item.nodeid)[0]])


def leave_slow(items: list[pytest.Item], config: pytest.Config) -> None:
    """Deselect what FILE calls slow, and what is marked so."""

    def slow(item: pytest.Item) -> bool:
        file, name = function_of(item.nodeid)
        return name in known().get(file, {}).get("slow", ()) or item.get_closest_marker("slow") is not None

    left = [item for item in items if slow(item)]
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT] = getattr(config, "workeroutput", {})["left"] = len(left)
    items[:] = [item for item in items if not slow(item)]


class Durations:
    """Measures each phase of each test, and each fixture that tests share; adds them up where reports arrive."""

    def __init__(self) -> None:
        self.since, self.took = processor_s(), defaultdict[str, float](float)
        self.shared: dict[str, float] = {}
        self.alone: dict[str, float] = {}
        self.left = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects, and leaves, the same."""
        self.left = getattr(node, "workeroutput", {}).get("left", 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        """What a fixture of several tests takes, with those that it asks for."""
        before = processor_s()
        found = yield
        if fixturedef.scope != "function":
            self.shared[fixturedef.argname] = processor_s() - before
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """A worker sends it with the report."""
        report = yield
        now = processor_s()
        report.processor_s, self.since = now - self.since, now
        if call.when == "call":
            names = getattr(item, "fixturenames", ())
            report.alone_s = report.processor_s + sum(self.shared.get(name, 0) for name in names)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of any process."""
        self.took[report.nodeid] += getattr(report, "processor_s", 0)
        self.alone[report.nodeid] = getattr(report, "alone_s", 0) or self.alone.get(report.nodeid, 0)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Say what was left; write the file; list the slowest."""
        if config.getoption("fast"):
            left = self.left or config.stash.get(LEFT, 0)
            terminalreporter.line(
                f"--fast ran {len(self.took)} tests and left {left}, which CI runs: bash tools/test.sh"
            )
        if not config.getoption("write_durations"):
            return
        terminalreporter.section("slowest 60 tests, seconds of a processor")
        for name, seconds in sorted(self.took.items(), key=lambda each: -each[1])[:60]:
            terminalreporter.line(f"{seconds:7.1f}  {name}")
        write(self.took, self.alone)
        terminalreporter.line(f"{sum(self.took.values()):7.1f}  together; written to {FILE}")


def write(took: dict[str, float], alone: dict[str, float]) -> None:
    """Replace what FILE says of the files that ran.

    Args:
        took: Seconds by test.
        alone: The same with all of the fixtures that it shares.
    """
    functions: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    seconds: dict[str, float] = defaultdict(float)
    for test, took_s in took.items():
        file, name = function_of(test)
        seconds[file] += took_s
        functions[file][name].append(alone.get(test, took_s))
    files = {file: entry for file, entry in known().items() if file not in functions and Path(file).exists()}
    for file, each in functions.items():
        slow = sorted(name for name, all_s in each.items() if sum(all_s) / len(all_s) > FAST_S)
        files[file] = {"seconds": round(seconds[file], 1), "slow": slow}
    lines = [
        f"{json.dumps(file)}: {json.dumps(entry)}"
        for file, entry in sorted(files.items(), key=lambda each: -each[1]["seconds"])
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
