"""Builds what the tests of the native side load: the core and the recording stand-in for the CUDA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins import builds
from tests.plugins.core_abi import Core, Recorder, compile_recorder


@pytest.fixture(scope="session")
def core_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libstill_core.so without kernels, with the toy op."""
    return builds.optimized("still_core", "libstill_core.so", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="session")
def recorder(core_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(compile_recorder(tmp_path_factory.mktemp("recorder")))


@pytest.fixture
def core(core_library: Path, recorder: Recorder) -> Core:
    """The core over the stand-in, with nothing loaded and no kernels."""
    core = Core(core_library)
    core.call("still_set_driver", str(recorder.path).encode())
    core.call("still_clear_archive")
    recorder.reset()
    return core
