"""Engines whose rows are not what they are alone are found, and a build leaves none behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from still_export.engines.build import BuildOptions, build_engines
from still_export.engines.builder import BuildError
from still_export.engines.row_check import WrongEngineError, check_rows
from still_export.package.folder import Package, open_package
from still_export.runtime.tensorrt import TrtModel
from still_export.runtime.trt_engine import TrtError
from tests.still_export import fake_tensorrt
from tests.still_export.packages import trt_package

ROWS = 3


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    package = trt_package(tmp_path / "trt", monkeypatch, "float32", batch=ROWS)
    fake_tensorrt.install(monkeypatch, "8.6.1")
    return package


Change = Callable[[np.ndarray], np.ndarray]


def wrong_in_batches(
    monkeypatch: pytest.MonkeyPatch, *, logits: Change = lambda x: x, counts: Change = lambda x: x, decode: bool = False
) -> None:
    """Make calls of several rows wrong; with `decode`, those of one token alone."""
    right = TrtModel.feed

    def wrong(self: TrtModel, ids: np.ndarray, new_tokens: np.ndarray | None = None) -> np.ndarray:
        given = np.full(self.batch, ids.shape[1]) if new_tokens is None else new_tokens
        if self.batch == 1 or (decode and ids.shape[1] > 1):
            return right(self, ids, given)
        return logits(right(self, ids, counts(given)))

    monkeypatch.setattr(TrtModel, "feed", wrong)


@pytest.mark.parametrize("context", [0, 12])
def test_rows_are_what_they_are_alone(package: Package, context: int) -> None:
    build_engines(package)
    assert 0 <= check_rows(TrtModel(package.path), ROWS, context) < 1e-5


def test_a_small_capacity_is_kept_within(package: Package) -> None:
    build_engines(package)
    model = TrtModel(package.path)
    model.table.capacity_tokens = 6
    assert 0 <= check_rows(model, ROWS) < 1e-5


def last(value: float) -> Change:
    def change(logits: np.ndarray) -> np.ndarray:
        logits[-1] = value
        return logits

    return change


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"logits": last(np.nan)},
            r"row 2 of 3 differs from the row alone after 0 tokens \(prefill of 7 tokens nan%, ",
        ),
        ({"logits": last(0.0), "decode": True}, r"row 2 of 3 .* \(decode step 1 100\.0%, decode step 2 "),
        ({"logits": lambda x: x[::-1]}, "row 0 of 3 differs from the row alone"),
        ({"counts": lambda n: n * [1, 1, 0]}, r"it counted \[13, 12, 0\] tokens instead of \[13, 12, 11\]"),
    ],
    ids=["nan", "zero", "swapped", "lost"],
)
def test_wrong_rows_are_found(
    package: Package, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    build_engines(package)
    wrong_in_batches(monkeypatch, **wrong)
    with pytest.raises(WrongEngineError, match=message):
        check_rows(TrtModel(package.path), ROWS)


def build_wrongly(package: Package) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wrong_in_batches(patch, logits=last(np.nan))
        with pytest.raises(BuildError, match=r"the engine is wrong: row \d of \d.* It was removed.*timing\.cache"):
            build_engines(package, BuildOptions(batch=2))
    assert not (package.path / "before").exists()


def test_a_wrong_engine_is_removed(package: Package) -> None:
    build_wrongly(package)
    assert not list(package.path.glob("*.plan"))
    left = open_package(package.path)
    assert left.manifest == package.manifest and left.manifest["engines"] == []
    (engine,) = build_engines(left)
    assert engine.is_file() and open_package(package.path).manifest["engines"]


def test_a_wrong_engine_leaves_the_old_one(package: Package) -> None:
    build_engines(package)
    built = open_package(package.path)
    build_wrongly(built)
    assert open_package(package.path).manifest == built.manifest, "every hash right, the engine's among them"
    assert check_rows(TrtModel(package.path), ROWS) < 1e-5


def test_an_engine_that_does_not_run_here_is_kept(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: TrtModel, *sizes: int) -> None:
        raise TrtError("out of device memory.")

    monkeypatch.setattr(TrtModel, "start", full)
    with pytest.raises(BuildError, match=r"the engine was built, but does not run here: out of device memory\."):
        build_engines(package)
    assert open_package(package.path).manifest["engines"]
