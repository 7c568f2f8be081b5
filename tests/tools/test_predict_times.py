"""The arithmetic of tools/predict_times.py, and that the notebook's table is of its calls; what it compiles is left out."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("predict_times", ROOT / "tools/predict_times.py")
assert SPEC and SPEC.loader
tool: Any = importlib.util.module_from_spec(SPEC)
sys.modules["predict_times"] = tool
SPEC.loader.exec_module(tool)


@pytest.mark.parametrize("bound", ["copy", "gemm"])
def test_a_call_keeps_its_share_of_the_floor_unless_fewer_warps_are_resident(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the rate takes twice the time; half the warps at the same rate, too; more warps than on sm_90 win nothing."""
    known = tool.Gpu("known", 100, 1e12, 1e15, 64, 1 << 17, 128, 1e9)
    cost = (1e9, 1.0) if bound == "copy" else (1.0, 1e12)
    kernel = tool.Kernel("op", "kernel", known, {"call": (cost, 4000.0)}, ("call",), {})
    programs = {90: 4, 80: 4, 86: 2, 100: 8}
    monkeypatch.setattr(
        tool,
        "compiled",
        lambda op, name, fields, arch, setting=(): tool.Code(64, (1 << 17) // programs[arch] - 1024, 4),
    )
    slow = replace(known, **{bound: getattr(known, bound) / 2})
    monkeypatch.setattr(tool, "GPUS", {80: slow, 86: known, 100: known})
    floor, time, registers, resident = tool.predicted(kernel, "call", 80)
    assert floor == pytest.approx({"copy": 1e3 / tool.COPY, "gemm": 1e3 / tool.GEMM}[bound] * 2)
    assert time == pytest.approx(8000) and (registers, resident) == (64, 16)
    assert tool.predicted(kernel, "call", 86)[1] == pytest.approx(8000)
    assert tool.predicted(kernel, "call", 100)[1] == pytest.approx(4000)


def test_registers_shared_memory_and_threads_bound_what_is_resident() -> None:
    """By hand, on an H100: 255 registers leave two programs of four warps, 100 KB two, 48 warps of 64 three of 16."""
    gpu = tool.GPUS[90]
    assert tool.Code(255, 0, 4).resident(gpu) == 8
    assert tool.Code(32, 100 << 10, 4).resident(gpu) == 8
    assert tool.Code(32, 0, 20).resident(gpu) == 60


def test_a_line_gives_back_what_it_was_made_of() -> None:
    """Start 5 and slope 2; of one point, or where the start would be negative, the line goes through 0."""
    assert tool.fitted([(1, 7), (10, 25), (100, 205)]) == pytest.approx((5, 2))
    assert tool.fitted([(10, 25)]) == pytest.approx((0, 2.5))
    assert tool.fitted([(1, 1), (10, 25)])[0] == 0


def test_one_program_a_multiprocessor_hides_nothing() -> None:
    """On an H200 attend with 128 keys at a time, for which there is room once, took 11.1 ms for 5.85: the model says 1.70 for 1.90."""
    alone, products = tool.H200.pair_clocks(128, 128, 1)
    assert products == tool.H200.pair_clocks(128, 64, 2)[0] < alone
    assert alone / products == pytest.approx(1.70, abs=5e-3)


def test_an_error_is_of_a_call_from_the_others() -> None:
    """Of three calls on a line none is off; a fourth that takes twice as long is half of what it is."""
    gpu = tool.GPUS[90]
    costs = [(float(n) * tool.COPY * gpu.copy / 1e6, 0.0) for n in (1, 10, 100, 50)]
    calls = {str(i): (cost, us) for i, (cost, us) in enumerate(zip(costs, (7, 25, 205, 210), strict=True))}
    straight = tool.Kernel("op", "kernel", gpu, {name: calls[name] for name in "012"}, (), {})
    assert max(map(abs, tool.errors(straight).values())) < 1e-9
    assert tool.errors(replace(straight, calls=calls))["3"] == pytest.approx(-0.5)


def test_the_setting_with_the_least_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves room for two programs; of two such the first."""
    shared = {64: {3: 90 << 10, 2: 57 << 10}, 32: {3: 53 << 10, 2: 36 << 10}}

    def compiled(op: str, name: str, fields: Any, arch: int, setting: tuple[Any, ...] = ()) -> Any:
        asked = dict(setting)
        return tool.Code(255, shared[asked["BN"]][asked["STAGES"]], 4, asked["BN"])

    monkeypatch.setattr(tool, "compiled", compiled)
    kernel = tool.KERNELS[0]
    assert {"BN": 64, "STAGES": 2}.items() <= dict(tool.best_blocks(kernel, 80)[0]).items()
    assert {"BN": 32, "STAGES": 2}.items() <= dict(tool.best_blocks(kernel, 86)[0]).items()


def test_the_notebook_has_the_calls_floors_and_errors_of_the_tool() -> None:
    """All that the tables say and no compiler is needed for."""
    page = (ROOT / "docs/notebook/computed.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(): cells[2:-1] for cells in (line.split("|") for line in page.splitlines()) if len(cells) > 3
    }
    for kernel in tool.KERNELS:
        for call in kernel.shown:
            cells = rows[f"{kernel.op}, {call}"]
            floors = [re.search(r"\(([\d,]+);", cell)[1] for cell in cells]  # type: ignore[index]
            assert floors == [
                f"{tool.GPUS[arch].floor_us(kernel.calls[call][0]):,.0f}" for arch in (80, 86, 89, 100, 120)
            ]
    for name, *cells in tool.off():
        assert [cell.strip() for cell in rows[name]] == cells
