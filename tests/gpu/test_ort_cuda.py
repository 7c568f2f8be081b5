"""Packages on ONNX Runtime's CUDA provider, on the GPU; and the checks themselves on the CPU, where they must pass, too.

STILL_GPU_PLACE=PLACE pytest -m gpu tests/gpu/test_ort_cuda.py
"""

import json
import sys
from pathlib import Path

import pytest

from still_export.errors import StillExportError
from still_export.package.refusals import RunError
from tests.gpu.conftest import Proof, prepared, run_command, told_by_verify
from tests.gpu.ort_checks import CHECKS, difference, opened
from tests.gpu.prepare import BODIES, DEMO, GUESSES, LINEAR_FAMILIES, OTHER_GPU, QUANTIZED, SMALL

LINEAR = [f"linear-{family}-{dtype}" for family in LINEAR_FAMILIES for dtype in ("float32", "float16")]
OF_QUANTIZERS = [f"quantized-{name}" for name in QUANTIZED]
RECORDED = [*SMALL[:2], *DEMO, *GUESSES, *LINEAR]
"""Packages with kernels, and PyTorch's answers beside them."""
BY_BODIES = [f"bodies-{family}-{dtype}" for family in BODIES for dtype in ("float32", "float16")]
KERNELS = 1e-4
"""Largest distance of kernels from bodies in float32, as a share of the largest logit; 2e-6 on an H200. In 16 bits it is recorded alone:
verify holds both to PyTorch."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*RECORDED, *OF_QUANTIZERS, *BY_BODIES])
def test_verify(name: str, proof: Proof, tmp_path: Path) -> None:
    """The verb, against PyTorch's recorded answers, or its answers."""
    package = proof.of(prepared(name), runtime="ort", provider="cuda")
    command = [
        sys.executable,
        "-m",
        "still_export.cli.main",
        "verify",
        str(package),
        "--provider",
        "cuda",
        "--trust-native",
    ]
    answers = ["--calls", f"{package}.npz"]
    if name in BY_BODIES:  # PyTorch has the model beside it
        family = name.removeprefix("bodies-").rpartition("-")[0]
        answers = ["--model", str(package.with_name(f"model-{family}")), "--lengths", "1,63,64,65,129,512"]
    said = run_command([*command, *answers, "--quiet"], tmp_path / "verify.log", 300)
    assert said.rstrip().endswith("PASSED"), said[-2000:]
    if codes := json.loads((package / "manifest.json").read_text()).get("source_codes"):
        proof.figures["codes"] = f"{codes['exact']} layers as they are, {len(codes['rounded'])} rounded again"
    proof.figures["verify"] = told_by_verify(said)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [*SMALL, *RECORDED[2:]])
def test_without_pytorch(name: str, check: str, proof: Proof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = proof.of(prepared(name), runtime="ort", provider="cuda")
    proof.figures.update(CHECKS[check](package, "cuda"))
    assert not name.endswith("float32") or proof.figures.get("logits", 0) < KERNELS


@pytest.mark.gpu
def test_a_package_for_another_gpu_is_refused(proof: Proof) -> None:
    package = proof.of(prepared(OTHER_GPU), runtime="ort", provider="cuda")
    with pytest.raises((RunError, StillExportError), match=r"the archive has .*the GPU is"):
        opened(package, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("check", sorted(set(CHECKS) - {"graph"}))
def test_checks_pass_on_the_cpu(
    check: str, native_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but that of CUDA graphs."""
    monkeypatch.chdir(tmp_path)
    assert CHECKS[check](native_package, "cpu").get("logits", 0) < KERNELS


def test_a_difference_is_relative_and_finite() -> None:
    assert difference([1.0, 3.0], [1.0, 4.0]) == 0.25
    with pytest.raises(AssertionError):
        difference([float("nan")], [1.0])
