"""The Triton kernels against the chunked form: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tolerances import REFERENCE

SCRIPT = Path(__file__).with_name("triton_cases.py")
spec = importlib.util.spec_from_file_location("triton_cases", SCRIPT)
assert spec and spec.loader
triton_cases = importlib.util.module_from_spec(spec)
sys.modules["triton_cases"] = triton_cases
spec.loader.exec_module(triton_cases)

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """Errors of all cases, from two processes that run the kernels in Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    names = list(triton_cases.CASES)
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), *names[part::2]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(2)
    ]
    results: dict[str, dict[str, float]] = {}
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        results |= json.loads(out)
    return results


def check(errors: dict[str, float], dtype: torch.dtype) -> None:
    """States that are copied or counted are exact; the rest is within tolerance."""
    exact = ("window_key", "window_value", "salient_key", "salient_value", "length")
    assert {name: error for name, error in errors.items() if name in exact and error} == {}
    limit = REFERENCE[dtype]
    assert {name: error for name, error in errors.items() if error > limit} == {}


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_interpreter(name: str, interpreted: dict[str, dict[str, float]]) -> None:
    check(interpreted[name], torch.float32)
