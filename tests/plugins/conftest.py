"""Builds what the tests of the native side load: the core and the recording stand-in for the CUDA driver."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL
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


@pytest.fixture(params=["baseline", "v3", "v4"])
def instructions(request: pytest.FixtureRequest, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels run by each instruction set that this processor has."""
    from tests.still_graphs.node_model import node_model, session

    monkeypatch.setenv("STILL_CPU", request.param)
    try:
        session(node_model(LOW_RANK_MATMUL, {}, torch.float32), library=library)
    except Exception as error:
        if "cannot run it" not in str(error):
            raise
        pytest.skip(f"this processor has no {request.param}")


@pytest.fixture
def mirror(core: Core, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The comparison, for any op: see `compare` in launches.py."""
    pytest.importorskip("triton")
    from tests.plugins.launches import compare

    return functools.partial(compare, core, recorder, tmp_path, monkeypatch)
