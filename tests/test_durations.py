"""What `--fast` leaves out."""

from __future__ import annotations

import pytest

pytest_plugins = ("pytester",)

TESTS = """
import time
import pytest

def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

@pytest.mark.parametrize("number", range(3))
def test_is_cheap(number): pass
def test_is_dear(): busy(0.3)
@pytest.mark.slow
def test_is_marked(): pass
"""
PLUGIN = """
from tests import durations
from tests.durations import pytest_addoption

def pytest_configure(config):
    config.pluginmanager.register(durations.Durations(config))

def pytest_collection_modifyitems(items, config):
    if config.getoption("fast"):
        durations.leave_slow(items, config)
"""


def test_what_took_long_before_is_left_out(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PLUGIN)
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['slow']")
    pytester.makepyfile(TESTS)
    fresh = pytester.runpytest_inprocess("-p", "no:xdist", "--fast")
    assert fresh.parseoutcomes() == {"passed": 4, "deselected": 1}
    found = pytester.runpytest_inprocess("-p", "no:xdist", "--fast")
    assert found.parseoutcomes() == {"passed": 3, "deselected": 2}
    found.stdout.fnmatch_lines(["*--fast ran 3 tests and left 2,*"])
