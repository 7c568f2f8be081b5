"""Trained models whose task is exact answer every query on a GPU, and do not with another sequence's state.

STILL_GPU_PLACE=PLACE STILL_TENSORRT_ENV=TENSORRT/env.sh pytest -m "gpu or tensorrt" tests/gpu/test_tasks.py
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Proof, TensorRt, prepared, run_command
from tests.gpu.prepare import ENGINE_TASKS, TASKS


def judge(said: str, proof: Proof) -> None:
    figures: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    proof.figures.update(figures)
    assert figures["asked"] > 100 and figures["wrong"] == 0 and figures["spoilt"] > 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", TASKS)
def test_onnxruntime(name: str, dtype: str, proof: Proof, tmp_path: Path) -> None:
    package = proof.of(prepared(f"task-{name}-{dtype}"), runtime="ort", provider="cuda")
    command = [sys.executable, "-m", "tests.task_checks", str(package), str(package.with_name(f"task-{name}.npz"))]
    judge(run_command([*command, "--provider", "cuda"], tmp_path / "said.log", 200), proof)


@pytest.mark.tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE_TASKS)
def test_tensorrt(name: str, proof: Proof, tensorrt: TensorRt, tmp_path: Path) -> None:
    source = proof.of(prepared(f"trt-task-{name}"), runtime="trt")
    package = tmp_path / name
    shutil.copytree(source, package)  # the engine is built into it
    tensorrt.run(f"still build {package} --quiet --trust-native", 600, "build")
    proof.versions["tensorrt"] = json.loads((package / "manifest.json").read_text())["engines"][0]["tensorrt"]
    task = source.with_name(f"task-{name}.npz")
    judge(tensorrt.run(f"module tests.task_checks {package} {task} --runtime trt", 200, "answers"), proof)
