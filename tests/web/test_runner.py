"""The npm package in Node: the same tokens as `run`, greedy and drawn, a snapshot of its own, and PyTorch's recorded calls."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_export.runtime.snapshot import Snapshot
from tests.web.conftest import WEB

pytestmark = pytest.mark.slow


def answered(package: Path, **asked: Any) -> dict[str, Any]:
    """What run.mjs says."""
    command = ["node", str(WEB / "run.mjs"), str(package), json.dumps(asked)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # type: ignore[no-any-return]


def test_tokens_are_those_of_run(dist: Path, package: Path, tmp_path: Path) -> None:
    file = tmp_path / "read.safetensors"
    said = answered(package, prompt="The ship", tokens=24, snapshot=str(file), calls="calls.npz")
    model = OrtModel(package, threads=1)
    model.start()
    assert said["tokens"] == said["again"] == list(model.generate(said["ids"], 24, Sampling()))
    assert Snapshot.load(file).length == len(said["ids"]) - 1
    assert said["verdicts"] and all(v["passed"] for v in said["verdicts"])


@pytest.mark.parametrize(("seed", "top_k", "top_p"), [(3, 0, 1.0), (2**40 + 7, 20, 1.0), (0, 0, 0.7)])
def test_draws_are_those_of_run(dist: Path, package: Path, seed: int, top_k: int, top_p: float) -> None:
    said = answered(package, prompt="The ship", tokens=24, temperature=0.8, topK=top_k, topP=top_p, seed=seed)
    model = OrtModel(package, threads=1)
    model.start()
    sampling = Sampling(0.8, top_k=top_k, top_p=top_p, seed=seed)
    assert said["tokens"] == list(model.generate(said["ids"], 24, sampling))
