"""A saved state goes from one runtime to the next: packages of one portable package on a CPU, CUDA and TensorRT, on the GPU.

STILL_GPU_PLACE=PLACE STILL_TENSORRT_ENV=TENSORRT/env.sh pytest -m tensorrt tests/gpu/test_snapshots.py
"""

import shutil
import sys
from dataclasses import asdict, dataclass
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
OTHER_CHOICES = 2e-3
"""The same where of a hundred salient tokens one at most is another."""


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


@dataclass(frozen=True)
class Apart:
    """How a state that travelled differs from that of who reads all of it on the CPU.

    logits: Largest difference of what comes behind it, as a share of the largest value.
    choices: Salient tokens that are others, of all layers and heads; rounding alone decides between nearly equal scores.
    kept: Salient tokens.
    worst, state: The largest difference of a state, as a share of its largest value, and which one it is.
    """

    logits: float
    choices: int
    kept: int
    worst: float
    state: str

    @property
    def close(self) -> bool:
        """As close as kernels are to bodies, or as the few other choices let it be."""
        return self.logits < (OTHER_CHOICES if 0 < self.choices <= self.kept / 100 else CLOSE)


def apart(package: Path, state: Snapshot) -> Apart:
    """What the state changes of the logits from there on, on the CPU."""
    one, another = opened(package, "cpu"), opened(package, "cpu")
    one.feed(np.array([TOKENS[: state.length]]))
    own, kept = one.take(), [name for name in state.arrays if name.startswith("salient_key")]
    rows = [np.linalg.norm(own[name] - state.arrays[name], axis=-1) for name in kept]
    sizes = [np.linalg.norm(own[name], axis=-1) for name in kept]
    worst, name = max((difference(state.arrays[name], own[name]), name) for name in state.arrays)
    others = sum(int((row > 0.05 * np.maximum(size, 1e-3)).sum()) for row, size in zip(rows, sizes, strict=True))
    state.restore(another, STEPS)
    logits = difference(
        *(
            np.concatenate([model.feed(np.array([[x]]))[0] for x in TOKENS[state.length : state.length + STEPS]])
            for model in (another, one)
        )
    )
    return Apart(logits, others, sum(row.size for row in rows), worst, name)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TensorRT's package with its engine."""
    source, folder = prepared(MOVED[1]), tmp_path_factory.mktemp("moved")
    shutil.copytree(source, folder / source.name)
    TensorRt(folder).run(f"still build {folder / source.name} --quiet --trust-native", 900, "build")
    return folder / source.name


@pytest.mark.slow
@pytest.mark.tensorrt
@pytest.mark.parametrize("by", ["cuda", "trt", "cuda, trt"])
def test_from_a_cpu_by_others_to_a_cpu(by: str, proof: Proof, tensorrt: TensorRt, engine: Path, tmp_path: Path) -> None:
    onnx = proof.of(prepared(MOVED[0]), target="states that travel", runtime=f"cpu, {by}, cpu")
    others = {"cuda": (f"{onnx} --provider cuda", False), "trt": (f"{engine} --runtime trt", True)}
    ways = [(f"{onnx}", False), *(others[name] for name in by.split(", "))]
    found = apart(onnx, Snapshot.load(travel(ways, tensorrt, tmp_path, READ[-len(ways) :])))
    proof.figures |= asdict(found)
    print(by, found)
    assert found.close, found


@pytest.mark.slow
def test_a_wrong_state_is_seen(native_package: Path, tensorrt: TensorRt, tmp_path: Path) -> None:
    """The check itself, on the CPU: what was read there passes, and a state that is off by a hundredth does not."""
    state = Snapshot.load(travel([(f"{native_package}", False)] * 3, tensorrt, tmp_path, (83, 120, 175)))
    found = apart(native_package, state)
    assert found.close and not found.choices and found.kept
    for name in state.arrays:
        if name.startswith("kv_state"):
            state.arrays[name] *= np.float32(1.01)
    assert not apart(native_package, state).close
    for name in state.arrays:
        if name.startswith("salient_key"):
            state.arrays[name][..., 0, :] *= -1
    found = apart(native_package, state)
    assert found.choices and not found.close
