"""How long tests took in earlier runs on this machine: what `--fast` leaves out.

pytest's own cache (`.pytest_cache`) keeps the seconds of each test function. A fresh clone has none: there `--fast` leaves out only what
is marked slow.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

KEY = "still-export/durations"
FAST_S = 0.15
"""Seconds that a test of `--fast` took at most, on average over its parameters, with the fixtures that it set up."""
LEFT = pytest.StashKey[int]()
"""How many tests `--fast` leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fast`."""
    parser.addoption("--fast", action="store_true", help=f"leave out tests that took more than {FAST_S} s before")


def function_of(name: str) -> str:
    """The test function of a node's name, without parameters."""
    return name.partition("[")[0]


def leave_slow(items: list[pytest.Item], config: pytest.Config) -> None:
    """Deselect tests that took long before or are marked slow."""
    known: dict[str, float] = cache.get(KEY, {}) if (cache := getattr(config, "cache", None)) else {}
    left = [i for i in items if i.get_closest_marker("slow") or known.get(function_of(i.nodeid), 0) > FAST_S]
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT] = getattr(config, "workeroutput", {})["left"] = len(left)
    items[:] = [item for item in items if item not in set(left)]


class Durations:
    """Keeps what test functions took; with pytest-xdist, in the process that collects the reports.

    Args:
        config: Of the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.left = config, 0
        self.took: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Every worker leaves out the same tests."""
        self.left = getattr(node, "workeroutput", {}).get("left", 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self.took[function_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests `--fast` left out; keep the seconds."""
        if self.config.getoption("fast"):
            left = self.left or self.config.stash.get(LEFT, 0)
            count = sum(map(len, self.took.values()))
            terminalreporter.line(f"--fast ran {count} tests and left {left}, which CI runs: bash tools/test.sh")
        cache = getattr(self.config, "cache", None)  # None: -p no:cacheprovider
        if cache and not hasattr(self.config, "workerinput"):
            mean = {name: round(sum(each.values()) / len(each), 3) for name, each in self.took.items()}
            cache.set(KEY, {**cache.get(KEY, {}), **mean})
