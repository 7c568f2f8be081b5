"""Both kernels of attend against its meaning in float64: on a GPU, and each in an interpreter of its own."""

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

from still_kernels.hybrid_attention import gluon_attend

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


FAST = (
    "ragged, three programs",
    "packed",
    "segments, packed",
    "three salient",
    "beyond the capacity",
    "phantom",
    "head size 64",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in attend_cases.CASES
        if name != "long"
    ],
)
def test_gluon_in_threads(name: str) -> None:
    """On the CPU: masks, what waits for what, and what is read of memory that nobody wrote."""
    check(attend_cases.run_case(name, "tma", "cpu", repeats=1), getattr(torch, attend_cases.CASES[name].dtype))


@pytest.mark.parametrize(
    ("text", "instead", "why"),
    [
        ("_clear(v_buffer.index(entry % SLOTS), known - slot_0, D)", "pass", "wrong"),
        ("(o_slot < seen)[None, :]", "(o_slot < seen + 1)[None, :]", "wrong|error"),
        ("m_new = (o_position >= length) & (o_position < end)", "m_new = o_position >= length", "wrong|outside"),
        ("mbarrier.arrive(v_empty.index(slot), count=1)\n\n            # Linear", "# Linear", "waits for"),
        ("_pass_over(entry + 1, k_full", "_pass_over(entry, k_full", "arrivals|waits for|changed"),
        ("mbarrier.wait(v_full.index(v_slot), (before // SLOTS) & 1)", "pass", "wrong|error|changed|arrivals"),
        ("number += 1\n        else:", "number += 2\n        else:", "waits for|changed|wrong|error|arrivals"),
    ],
    ids=lambda text: text[:40],
)
def test_the_threads_find_what_is_wrong(
    text: str, instead: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one line of the kernel changed."""
    interpreter = attend_cases.gluon_interpreter()
    monkeypatch.setattr(interpreter, "PATIENCE_S", 1.0)
    source = Path(gluon_attend.__file__).read_text()
    assert source.count(text) == 1
    changed = tmp_path / "changed.py"
    changed.write_text(source.replace(text, instead))
    found = interpreter.interpreted(changed)
    monkeypatch.setattr(interpreter, "interpreted", lambda path: found)
    with pytest.raises((AssertionError, interpreter.Stuck), match=why):
        for _ in range(3):  # a wait that is missing shows where a copy comes late
            check(attend_cases.run_case("ragged, three programs", "tma", "cpu", repeats=1), torch.bfloat16)


@pytest.mark.slow
def test_the_cases_in_the_interpreter() -> None:
    """What is expected of both kernels, shown with the one that Triton's interpreter can run."""
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
