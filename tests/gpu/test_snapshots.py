"""A saved state goes from one runtime to the next: packages of one portable package on a CPU, CUDA and TensorRT, on the GPU.

STILL_GPU_PLACE=PLACE STILL_TENSORRT_ENV=TENSORRT/env.sh pytest -m tensorrt tests/gpu/test_snapshots.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from still_export.runtime.snapshot import Snapshot
from tests.gpu.conftest import Proof, TensorRt, prepared, run_command
from tests.gpu.ort_checks import difference, opened
from tests.gpu.prepare import MOVED

READ = (333, 480, 700)
"""Tokens read at the end of each runtime's turn: inside a chunk, and over the end of some."""
STEPS = 70
TOKENS = [7 * i % 53 + 3 for i in range(READ[-1] + STEPS)]
CLOSE = 1e-4
"""Largest distance of logits, as a share of the largest: as of kernels from bodies."""


def travel(ways: list[tuple[str, bool]], tensorrt: TensorRt, folder: Path, read: tuple[int, ...] = READ) -> Path:
    """The state of a prompt that was read in turns by `ways`, each what `still run` gets and whether TensorRT's Python runs it."""
    loaded, path, begin = "", folder, 0
    for number, ((package, by_tensorrt), end) in enumerate(zip(ways, read, strict=True)):
        path, ids = folder / f"{number}.safetensors", ",".join(map(str, TOKENS[begin:end]))
        asked = f"run {package} --prompt-ids {ids} {loaded} --save-state {path} --trust-native --quiet"
        if by_tensorrt:
            tensorrt.run(f"still {asked}", 120, f"run{number}")
        else:
            run_command(f"{sys.executable} -m still_export.cli.main {asked}", folder / f"run{number}.log", 120)
        loaded, begin = f"--load-state {path}", end
    return path


def apart(package: Path, state: Snapshot) -> float:
    """By how much logits from there on differ from those of who read all of it on the CPU."""
    one, another = opened(package, "cpu"), opened(package, "cpu")
    one.feed(np.array([TOKENS[: state.length]]))
    state.restore(another, STEPS)
    return difference(
        *(
            np.concatenate([model.feed(np.array([[x]]))[0] for x in TOKENS[state.length : state.length + STEPS]])
            for model in (another, one)
        )
    )


@pytest.mark.slow
@pytest.mark.tensorrt
def test_from_a_cpu_by_cuda_and_tensorrt_to_a_cpu(proof: Proof, tensorrt: TensorRt, tmp_path: Path) -> None:
    onnx, source = prepared(MOVED[0]), proof.of(prepared(MOVED[1]), runtime="cpu, cuda, trt, cpu")
    package = tmp_path / source.name
    shutil.copytree(source, package)
    tensorrt.run(f"still build {package} --quiet --trust-native", 460, "build")
    ways = [(f"{onnx}", False), (f"{onnx} --provider cuda", False), (f"{package} --runtime trt", True)]
    proof.figures["logits"] = apart(onnx, Snapshot.load(travel(ways, tensorrt, tmp_path)))
    assert proof.figures["logits"] < CLOSE


@pytest.mark.slow
def test_a_wrong_state_is_seen(native_package: Path, tensorrt: TensorRt, tmp_path: Path) -> None:
    """The check itself, on the CPU: what was read there passes, and a state that is off by a hundredth does not."""
    state = Snapshot.load(travel([(f"{native_package}", False)] * 3, tensorrt, tmp_path, (83, 120, 175)))
    assert apart(native_package, state) < CLOSE
    for name in state.arrays:
        if name.startswith("kv_state"):
            state.arrays[name] *= np.float32(1.01)
    assert apart(native_package, state) > CLOSE
