"""What bench_engine times must be right: a faster engine that skips rows is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from still_export.build import build_engines
from still_export.runners.tensorrt import TrtModel
from tests.still_export import fake_tensorrt
from tests.still_export.test_build import trt_package


@pytest.fixture
def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools/bench_engine.py"
    spec = importlib.util.spec_from_file_location("bench_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrtModel:
    package = trt_package(tmp_path / "trt", monkeypatch, "float32", batch=3)
    fake_tensorrt.install(monkeypatch, "8.6.1")
    build_engines(package)
    return TrtModel(package.path)


def test_rows_are_what_they_are_alone(tool: ModuleType, model: TrtModel) -> None:
    assert tool.check_rows(model, 3, 12) < 1e-5


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_a_wrong_row_is_found(tool: ModuleType, model: TrtModel, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    right = TrtModel.feed

    def wrong(self: TrtModel, ids: np.ndarray) -> np.ndarray:
        logits = right(self, ids)
        logits[1:] = value
        return logits

    monkeypatch.setattr(TrtModel, "feed", wrong)
    with pytest.raises(RuntimeError, match="WRONG at batch 3: a row is"):
        tool.check_rows(model, 3, 12)


def test_lost_tokens_are_found(tool: ModuleType, model: TrtModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TrtModel.feed
    monkeypatch.setattr(
        TrtModel, "feed", lambda self, ids: right(self, ids, np.minimum(1, np.arange(1, self.batch + 1) % 2))
    )
    with pytest.raises(RuntimeError, match=r"WRONG at batch 3: lengths \[16, 12, 16\] after 16 tokens"):
        tool.check_rows(model, 3, 12)
