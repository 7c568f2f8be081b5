"""Weights beside a graph are read wherever they lie: in a file, in Hugging Face's cache of links, in a file with two names."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from still_export.graph.weights_file import stored_array
from still_export.package.refusals import CheckError

RANDOM = np.random.default_rng(0)
WEIGHTS: dict[str, Any] = {
    "single": RANDOM.normal(size=(33, 7)).astype(np.float32),
    "half": RANDOM.normal(size=(5, 129)).astype(np.float16),
    "bfloat16": RANDOM.normal(size=300).astype(ml_dtypes.bfloat16),
    "codes": RANDOM.integers(0, 16, (9, 15)).astype(ml_dtypes.uint4),
    "inside": np.arange(3),
}


def folder(path: Path, place: str) -> Path:
    """A graph of WEIGHTS, whose file lies at `place`."""
    path = path / "models--a--b" / "snapshots" / "0123"
    path.mkdir(parents=True)
    (blobs := path.parents[1] / "blobs").mkdir()
    tensors = [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items()]
    model = helper.make_model(helper.make_graph([], "g", [], [], tensors))
    onnx.save(model, path / "g.onnx", save_as_external_data=True, location="g.data", size_threshold=64)
    if place == "a blob":
        (path / "g.data").rename(blobs / "0a1b")
        (path / "g.data").symlink_to("../../blobs/0a1b")
    if place == "elsewhere":
        (path / "g.data").rename(path.parents[2] / "g.data")
        (path / "g.data").symlink_to(path.parents[2] / "g.data")
    if place == "a file with two names":
        os.link(path / "g.data", path / "other.data")
    return path


@pytest.mark.parametrize("place", ["the folder", "a blob", "a file with two names"])
def test_weights_are_read_where_they_lie(place: str, tmp_path: Path) -> None:
    path = folder(tmp_path, place)
    tensors = onnx.load(path / "g.onnx", load_external_data=False).graph.initializer
    assert {t.name for t in tensors if t.external_data} == WEIGHTS.keys() - {"inside"}
    for tensor in tensors:
        found = stored_array(tensor, path)
        assert found.dtype == WEIGHTS[tensor.name].dtype
        np.testing.assert_array_equal(found.astype(np.float32), WEIGHTS[tensor.name].astype(np.float32))


def test_links_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, "elsewhere")
    with pytest.raises(CheckError):
        stored_array(onnx.load(path / "g.onnx", load_external_data=False).graph.initializer[0], path)
