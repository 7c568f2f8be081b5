"""An export gives the same package whatever the process that asks for it has set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import still_export
from still_export.errors import ConfigError
from still_export.package.files import sha256
from tests.still_export.linear_models import linear_model
from tests.still_export.verbs import call

pytest.importorskip("onnxruntime")
FILES = ("model.onnx", "model.onnx.data")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ambient") / "m"
    linear_model("lfm2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def right(model: Path) -> dict[str, str]:
    package = model.parent / "p"
    assert call("export", model, "--to", "onnx", "--no-native", "-o", package, "-q") == 0
    return {name: sha256(package / name) for name in FILES if (package / name).exists()}


@pytest.mark.parametrize("level", ["1", "2"])
def test_of_python(model: Path, right: dict[str, str], tmp_path: Path, level: str) -> None:
    """PYTHONOPTIMIZE drops assertions, and docstrings with 2, which transformers reads when it is imported."""
    package = tmp_path / "p"
    for words in (
        ["export", model, "--to", "onnx", "--no-native", "-o", package, "-q"],
        ["run", package, "--prompt-ids", "5,6,7", "--tokens", "3", "--json"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "still_export.cli.main", *map(str, words)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONOPTIMIZE": level, "STILL_BUILD_KERNELS": "0"},
        )
        assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 3
    assert {name: sha256(package / name) for name in right} == right


@pytest.mark.usefixtures("traced_anew")
def test_of_torch(model: Path, right: dict[str, str], tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            still_export.export(str(model), tmp_path / "p", to="onnx", native=False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert {name: sha256(tmp_path / "p" / name) for name in right} == right


def test_verify_of_torch(model: Path, right: dict[str, str], tmp_path: Path) -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = still_export.verify(model.parent / "p", output=tmp_path, lengths=(5,), decode_steps=2)
    assert right and found.passed, found.to_dict()


def test_weights_without_content_are_refused(model: Path, tmp_path: Path) -> None:
    with FakeTensorMode(), pytest.raises(ConfigError, match="FakeTensor"):
        still_export.export(str(model), tmp_path / "p", to="onnx", native=False)
    assert not (tmp_path / "p").exists()
