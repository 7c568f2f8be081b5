"""Both kernels of attend against its meaning in float64: the one for any GPU in the interpreter too, the one for sm_90 on a GPU alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.tolerances import NARROW_NORM, REFERENCE

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("attend_cases.py")


def load() -> ModuleType:
    """The cases, from this folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec and spec.loader
    module = sys.modules[SCRIPT.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attend_cases = load()
INTERPRETED = ("part of a tile", "ragged, padded", "packed", "beyond the capacity", "segments, packed", "phantom")


def check(errors: dict[str, float], dtype: torch.dtype) -> None:
    """Nothing is NaN that should not be, nothing beside the output was written, every run gives the same bits."""
    assert {what: errors[what] for what in ("wrong", "outside", "repeats") if errors[what]} == {}
    assert errors["error"] <= REFERENCE[dtype]
    assert errors["norm"] <= (NARROW_NORM if dtype != torch.float32 else REFERENCE[dtype])


@pytest.mark.slow
def test_the_cases_in_the_interpreter() -> None:
    """What is expected of both kernels, shown with the one that the interpreter can run."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "triton", *INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for errors in json.loads(done.stdout).values():
        check(errors, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "tma"])
@pytest.mark.parametrize("name", attend_cases.CASES)
def test_attend(name: str, kernel: str) -> None:
    if kernel == "tma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is of sm_90")
    check(attend_cases.run_case(name, kernel), getattr(torch, attend_cases.CASES[name].dtype))
