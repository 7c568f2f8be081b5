"""What `--fast` leaves out, and what `--write-durations` writes for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import durations

pytest_plugins = ("pytester",)

TESTS = """
import time
import pytest

def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def dear():
    busy(0.3)

def test_reads_it_first(dear): pass
def test_reads_it_again(dear): pass
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
    config.pluginmanager.register(durations.Durations())

def pytest_collection_modifyitems(items, config):
    if config.getoption("fast"):
        durations.leave_slow(items, config)
"""


@pytest.fixture
def own_file(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the place of tests/durations.json."""
    monkeypatch.setattr(durations, "FILE", pytester.path / "durations.json")
    durations.FILE.write_text("{}")
    durations.known.cache_clear()
    yield durations.FILE
    durations.known.cache_clear()


def test_what_takes_long_alone_is_left_out(pytester: pytest.Pytester, own_file: Path) -> None:
    """A test is charged with a fixture that another one paid for: it pays where that one is left out."""
    pytester.makeconftest(PLUGIN)
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['slow']")
    file = pytester.makepyfile(TESTS).name
    assert pytester.runpytest_inprocess("-p", "no:xdist", "--write-durations").parseoutcomes() == {"passed": 7}
    durations.known.cache_clear()
    written = json.loads(own_file.read_text())
    assert written[file]["slow"] == ["test_is_dear", "test_reads_it_again", "test_reads_it_first"]
    assert 0.6 <= written[file]["seconds"] < 10
    found = pytester.runpytest_inprocess("-p", "no:xdist", "--fast")
    assert found.parseoutcomes() == {"passed": 3, "deselected": 4}
    found.stdout.fnmatch_lines(["*--fast ran 3 tests and left 4,*"])


def test_files_that_did_not_run_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    monkeypatch.setattr(
        durations, "known", lambda: {__file__: {"seconds": 3.0, "slow": ["a"]}, "gone.py": {}, "b.py": {}}
    )
    durations.write({"b.py::test_c[1]": 0.1, "b.py::test_c[2]": 0.4}, {})
    assert json.loads((tmp_path / "durations.json").read_text()) == {
        __file__: {"seconds": 3.0, "slow": ["a"]},
        "b.py": {"seconds": 0.5, "slow": ["test_c"]},
    }
