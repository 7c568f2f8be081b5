"""What benchmarks share: turns, blocks, the figures of times, records; and each benchmark explains itself."""

import json
import os
import runpy
import sys
from itertools import count
from pathlib import Path

import pytest

from tools.benchmarks.common import Findings, Times, in_blocks, numbers, time_calls, time_in_turns
from tools.verdicts import read_records

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted(p.stem for p in (ROOT / "tools/benchmarks").glob("*.py") if "parser_of(__doc__)" in p.read_text())


def test_turns_alternate_and_those_that_warm_up_do_not_count() -> None:
    order: list[str] = []
    ticks = count()
    times = time_in_turns(
        {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), next(ticks))},
        2,
        1,
        lambda: float(next(ticks)),
    )
    assert order == ["a", "b"] * 3
    assert times["a"].seconds == (1.0, 1.0) and times["b"].seconds == (2.0, 2.0)
    assert len(time_calls(lambda: None, 5, 0).seconds) == 5


def test_figures_of_times() -> None:
    times = Times((4.0, 1.0, 2.0, 3.0, 100.0))
    assert times.figures("s") == {"median_s": 3.0, "best_s": 1.0, "spread": round((52 - 1.5) / 3, 4), "runs": 5}
    assert Times((1e-6, 3e-6)).figures("us") == {"median_us": 2.0, "best_us": 1.0, "spread": 0.0, "runs": 2}


def test_blocks_wait_once() -> None:
    calls: list[str] = []
    in_blocks(lambda: calls.append("call"), 3, lambda: calls.append("wait"))()
    assert calls == ["call", "call", "call", "wait"]
    assert numbers("1,8") == [1, 8] and numbers("") == []


def test_findings_are_lines_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Findings()
    found.add(tokens=3, decode_us=1.5)
    found.record(None, "a", {})
    found.record(tmp_path, "a benchmark", {"geometry": "llama-8b"})
    lines = capsys.readouterr().out.splitlines()
    (record,) = read_records(tmp_path)
    assert (
        json.loads(lines[0]) == {"tokens": 3, "decode_us": 1.5} and lines[1].startswith("record: ") and len(lines) == 2
    )
    assert record.kind == "benchmark" and record.figures == {"rows": [{"tokens": 3, "decode_us": 1.5}]}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"tools.benchmarks.{name}", run_name="__main__")
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith("usage:") and "--record" in said
