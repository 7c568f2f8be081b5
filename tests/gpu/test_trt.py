"""Packages on TensorRT: built, verified by the runner and by polygraphy, and run by both programs, on the GPU.

STILL_GPU_PLACE=PLACE STILL_TENSORRT_ENV=TENSORRT/env.sh pytest -m tensorrt tests/gpu
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.gpu.conftest import TENSORRT, Proof, TensorRt, prepared, told_by_verify
from tests.gpu.prepare import ENGINES, GUESSES

pytestmark = [pytest.mark.tensorrt, pytest.mark.slow]  # slow: they come first, an engine takes minutes


TIES = {"float32": 1e-3, "float16": 0.05}
"""By how much tokens may differ where an answer with guesses parts from the plain one: calls of several tokens are rounded otherwise."""


def tactics_of(engine: str) -> dict[str, int]:
    """Which kernels the matrix products run on, and how many of them, by the engine's own list of layers."""
    found: dict[str, int] = {}
    for name in re.findall(r'"TacticName": "(\w*gemm_\w*?)_(?:[nt]{2}_n|tilesize)', engine):
        found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_engine(name: str, proof: Proof, tensorrt: TensorRt, tmp_path: Path) -> None:
    """verify passes, polygraphy agrees, and the C++ program gives the Python runner's tokens."""
    source = proof.of(prepared(name), runtime="trt")
    package = tmp_path / name
    shutil.copytree(source, package)  # the engine is built into it
    tensorrt.run(f"still build {package} --quiet --trust-native", 900, "build")
    proof.versions["tensorrt"] = json.loads((package / "manifest.json").read_text())["engines"][0]["tensorrt"]
    proof.figures["tactics"] = tactics_of((package / "engine.json").read_text(errors="replace"))
    said = tensorrt.run(
        f"still verify {package} --runtime trt --calls {source}.npz --polygraphy --quiet", 300, "verify"
    )
    assert said.rstrip().endswith("PASSED"), said[-2000:]
    proof.figures["verify"] = told_by_verify(said)
    if codes := json.loads((package / "manifest.json").read_text()).get("source_codes"):
        proof.figures["codes"] = f"{codes['exact']} layers as they are, {len(codes['rounded'])} rounded again"
    rates = re.findall(r"Pass Rate: ([\d.]+)%", tensorrt.run(f"sh {package}/verify/polygraphy.sh", 120, "polygraphy"))
    assert rates and float(rates[-1]) == 100, rates
    vocabulary = json.loads((package / "manifest.json").read_text())["model"]["vocab_size"]
    ids = ",".join(str(7 * i % min(500, vocabulary - 3) + 3) for i in range(600))  # more than a prefill call
    asked = f"still run {package} --runtime trt --prompt-ids {ids} --tokens 64 --json --quiet --guess"
    run = tensorrt.run(f"{asked} none", 90, "run")
    library = f"export LD_LIBRARY_PATH={Path(os.environ.get(TENSORRT, '')).parent}/lib:$LD_LIBRARY_PATH; "
    direct = tensorrt.run(f"{library}{package}/still_run8 {package} --prompt-ids {ids} --tokens 64", 90, "still_run")
    python = json.loads(next(line for line in run.splitlines() if line.startswith("{")))["tokens"]
    cpp = [int(x) for x in re.findall(r"^[\d ]+$", direct, re.M)[0].split()]
    assert cpp and python[: len(cpp)] == cpp[: len(python)]
    if name.removeprefix("trt-") in GUESSES:
        cases = {entry["case"] for entry in json.loads((package / "verify/report.json").read_text())["outputs"]}
        assert any(case.endswith("guessed") for case in cases)
        command = f"module tools.benchmarks.guesses {package} --equal 100 --tokens 32 --tie {TIES[name.split('-')[-1]]}"
        proof.figures["guesses"] = json.loads(tensorrt.run(command, 120, "guesses").strip().splitlines()[-1])
    proof.figures["still_run"] = direct.strip().splitlines()[-1]
    proof.figures["took_s"] = ", ".join(f"{name} {seconds}" for name, seconds in tensorrt.seconds.items())
