"""What all tests share: those that need hardware which is absent say so, and a failed one says what repeats it."""

from __future__ import annotations

import gc
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from still_export.graph.garbage import RARELY
from still_export.package.cache import CACHE_VARIABLE
from still_export.package.installed import MODULE
from still_export.targets.ort.library import BUILD_VARIABLE, cached_library, keep_library, this_cpu
from tests import durations
from tests.plugins import builds

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "triton"))
"""What Triton compiled, by its sources: for all processes and later runs."""


SEED = 20260202
"""Of every `verify` that names none: a run of these tests repeats the one before. Other seeds are those of `tests.faults.clean`."""


@pytest.fixture(autouse=True, scope="session")
def drawn_seed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.randbelow", lambda bound: SEED % bound)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of runs of many tests."""
    durations.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Keep what tests take."""
    config.pluginmanager.register(durations.Durations(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> Iterator[None]:
    """Of tests of a file that need a GPU, or TensorRT, which is not here, keep the first, which says how many there are."""
    yield
    if any(item.get_closest_marker(kind) for item in items for kind in ("gpu", "tensorrt")):
        _leave_absent(items, config)
    if config.getoption("fast"):
        durations.leave_slow(items, config)


def _leave_absent(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark tests as skipped whose hardware is not here, one a file; deselect the others."""
    import torch

    cuda = torch.cuda.is_available()
    # TensorRT 8.6 has a Python of its own (tests/gpu/conftest.py).
    tensorrt = cuda and bool(os.environ.get("STILL_TENSORRT_ENV") or importlib.util.find_spec("tensorrt"))
    absent = {"gpu": "a CUDA device"} if not cuda else {}
    absent |= {"tensorrt": "TensorRT and a CUDA device"} if not tensorrt else {}
    cannot: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if kind := next((kind for kind in absent if item.get_closest_marker(kind)), None):
            cannot.setdefault((item.path, kind), []).append(item)
    for (_, kind), (first, *others) in cannot.items():
        more = f", as {len(others)} more of this file do" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"needs {absent[kind]}{more}"))
    left = {id(item) for _, *others in cannot.values() for item in others}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What repeats each failed test alone."""
    failed = dict.fromkeys(
        report.nodeid for kind in ("failed", "error") for report in terminalreporter.getreports(kind)
    )
    if failed:
        terminalreporter.section("to repeat one alone")
    for name in failed:
        terminalreporter.line(f"python -m pytest -p no:xdist {shlex.quote(name)}")


def pytest_collection_finish() -> None:
    """What was imported, a million objects, stays: looking through it for garbage again and again was a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


@pytest.fixture(scope="session", autouse=True)
def own_configuration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests write no list of trusted files into the home of who runs them, and take no kernels from there."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("configuration"))
    os.environ[CACHE_VARIABLE] = str(tmp_path_factory.mktemp("cache"))
    os.environ[BUILD_VARIABLE] = "0"  # minutes in each process of tests
    sys.modules[MODULE] = None  # type: ignore[assignment]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """libstill_onnxruntime.so with the toy op and without kernels of the GPU; or that of test_sanitized.py."""
    if built := os.environ.get("STILL_TEST_LIBRARY"):
        return built
    builds.demand_headers()
    return str(builds.optimized("still_onnxruntime", "onnxruntime/*.so", tmp_path_factory.mktemp("native")))


@pytest.fixture(scope="session")
def kernels_cache(library: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the library was built."""
    before, folder = os.environ[CACHE_VARIABLE], tmp_path_factory.mktemp("kernels")
    os.environ[CACHE_VARIABLE] = str(folder)
    path = cached_library(this_cpu())
    os.environ[CACHE_VARIABLE] = before
    keep_library(Path(library), path)
    return folder
