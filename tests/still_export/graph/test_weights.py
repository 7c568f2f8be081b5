"""An export holds one weight at a time."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import CheckpointError
from still_export.graph.options import ExportOptions
from still_export.models.load import load_model, open_source
from still_export.models.read import weights
from still_export.targets.export import export
from tests.still_export.tiny import MIXED, still_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    still_model("llama", torch.bfloat16, layer_types=MIXED).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_each_weight_is_read_once_and_forgotten(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    read: list[tuple[int, weakref.ref]] = []
    original = weights.value_of

    def value_of(weight: Any) -> torch.Tensor:
        gc.collect()
        assert not [i for i, value in read if value() is not None], "an earlier weight is still held"
        value = original(weight)
        read.append((id(weight), weakref.ref(value)))
        return value

    monkeypatch.setattr("still_export.graph.lower.value_of", value_of)
    gc.collect()
    gc.freeze()  # what was there before the export need not be looked at for every weight
    export(ExportOptions(str(folder)), tmp_path / "package")
    names = open_source(str(folder)).weights
    assert len(read) == len({i for i, _ in read}) == len(names)


def test_outline_is_the_model_without_values(folder: Path) -> None:
    source, model = open_source(str(folder)), load_model(str(folder))
    outline = source.outline()
    shapes = {name: (p.shape, p.dtype) for name, p in outline.named_parameters()}
    assert shapes == {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    assert set(source.weights) == set(shapes)


@pytest.mark.slow
def test_damage_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder))
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 5] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.down_proj\.weight .* holds NaN"):
        export(ExportOptions(str(folder)), tmp_path / "package")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
