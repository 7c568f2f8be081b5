"""Builds what the tests of the native side load: the core and the recording stand-in for the CUDA driver."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from still_export.export.plugins import build_plugins
from tests.plugins.core_abi import Core, Recorder, compile_recorder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def core_library() -> Path:
    """libstill_core.so without kernels, with the toy op, built once per checkout into build/, which git ignores."""
    if not shutil.which("cmake") or not shutil.which("g++"):
        pytest.skip("needs cmake and g++")
    return build_plugins(ROOT / "build/plugins-core", ops=(ROOT / "tests/toy/decay",)) / "libstill_core.so"


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
