"""What verify runs and saves for TensorRT."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from still_export.package.folder import Package
from still_export.proof.sessions import Session, Subject
from tests.still_export.packages import trt_package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    package = trt_package(tmp_path / "trt", monkeypatch)
    package.manifest["engines"] = [{"file": "engine.plan", "tensorrt": "10.3.0", "batch": 2, "prefill_tokens": 16}]
    return package


def call(tokens: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.zeros((1, tokens), np.int64),
        "past_window_key.0": np.ones((1, 3, 16, 4), np.float32),
        "past_kv_state.0": np.ones((1, 6, 10, 4), np.float32),
    }


def test_saved_calls_have_the_engines_types_and_fit_its_profile(package: Package) -> None:
    target = Subject(package, "trt")
    feeds, expected = target.saved([call(16), call(17)], [{"present_length": np.ones(1, np.int64)}] * 2)
    assert len(feeds) == len(expected) == 1
    kinds = {name: array.dtype.name for name, array in feeds[0].items()}
    assert kinds == {"input_ids": "int32", "past_window_key.0": "float16", "past_kv_state.0": "float32"}
    assert expected[0]["present_length"].dtype == np.int32


def test_polygraphys_command_loads_the_library_that_registers_itself(package: Package) -> None:
    command = shlex.join(Subject(package, "trt").command())
    folder = package.path
    assert command == (
        f"polygraphy run {folder}/engine.plan --model-type engine --trt --plugins {folder}/libstill_tensorrt10_static.so"
    )
    other = shlex.join(Subject(package, "trt", plugin=folder / "mine.so").command())
    assert other.endswith(f"--plugins {folder}/mine_static.so"), "polygraphy only opens libraries"


def test_what_was_seen_has_the_rows_of_the_largest_call() -> None:
    """A runtime may try a call of one sequence before those of several."""
    first = (np.zeros(1, np.int64), np.ones(1, np.int64), [np.full((1, 1, 2), 7, np.int32)])
    then = (np.array([0, 1]), np.array([2, 1]), [np.arange(8, dtype=np.int32).reshape(2, 2, 2)])
    (found,) = Session(SimpleNamespace(seen=[first, then])).seen()  # type: ignore[arg-type]
    assert found.tolist() == [[[0, 1], [2, 3]], [[-1, -1], [4, 5]]]
