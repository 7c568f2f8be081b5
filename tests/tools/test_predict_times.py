"""The arithmetic of tools/predict_times.py; what it compiles is left out."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("predict_times", Path(__file__).parents[2] / "tools/predict_times.py")
assert SPEC and SPEC.loader
tool: Any = importlib.util.module_from_spec(SPEC)
sys.modules["predict_times"] = tool
SPEC.loader.exec_module(tool)


@pytest.mark.parametrize("bound", ["copy", "gemm"])
def test_a_call_keeps_its_share_of_the_floor_unless_fewer_warps_are_resident(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the rate takes twice the time; half the warps at the same rate, too; more warps than on sm_90 win nothing."""
    known = tool.Gpu("known", 100, 1e12, 1e15, 64, 1 << 17)
    cost = (1e9, 1.0) if bound == "copy" else (1.0, 1e12)
    call = tool.Timed(lambda: cost, 4000.0, known, "op", "kernel", {})
    warps = {90: 16, 80: 16, 86: 8, 100: 32}
    monkeypatch.setattr(tool, "resident_warps", lambda op, kernel, fields, arch: (128, warps[arch]))
    slow = replace(known, **{bound: getattr(known, bound) / 2})
    monkeypatch.setattr(tool, "GPUS", {80: slow, 86: known, 100: known})
    floor, time, registers, resident = tool.predicted(call, 80)
    assert floor == pytest.approx({"copy": 1e3 / tool.COPY, "gemm": 1e3 / tool.GEMM}[bound] * 2)
    assert time == pytest.approx(8000) and (registers, resident) == (128, 16)
    assert tool.predicted(call, 86)[1] == pytest.approx(8000)
    assert tool.predicted(call, 100)[1] == pytest.approx(4000)
