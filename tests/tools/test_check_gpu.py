"""Pieces end in time, and what failed stays in the record."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from tools import check_gpu
from tools.check_gpu import FAILURES, Piece

LOUD = "import sys; print('3 passed in 1s'); print('the end', flush=True); "


def test_a_piece_is_stopped_with_what_it_started_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(f"import time; time.sleep(60); open({str(tmp_path / 'late')!r}, 'w')")
    child = f"import subprocess; subprocess.run([sys.executable, {str(tmp_path / 'child.py')!r}])"
    wrong = f"open({str(tmp_path / 'found.json')!r}, 'w').write('7'); sys.exit(3)"
    pieces = {
        "hangs": Piece(1.0, {"hangs": [sys.executable, "-c", LOUD + child]}),
        "fails": Piece(30, {"fails": [sys.executable, "-c", LOUD + wrong]}, files={"found": tmp_path / "found.json"}),
        "passes": Piece(30, {"passes": [sys.executable, "-c", LOUD]}),
        "absent": Piece(30, missing="a library is not installed"),
    }
    monkeypatch.setattr(check_gpu, "PIECES", {name: lambda *a, piece=piece: piece for name, piece in pieces.items()})
    begin = time.monotonic()
    options = argparse.Namespace(output=tmp_path / "out", seconds=60.0, pieces=list(pieces), place=tmp_path)
    assert check_gpu.run(options) == 1 and time.monotonic() - begin < 30
    record = json.loads((tmp_path / "out/check_gpu.json").read_text())
    found = record["figures"]["pieces"]
    assert record["verdict"] == "failed" and {name: each["verdict"] for name, each in found.items()} == {
        "hangs": "failed", "fails": "failed", "passes": "passed", "absent": "left out",
    }  # fmt: skip
    assert (
        "no end" in found["hangs"]["failed"]["hangs"]["why"]
        and found["hangs"]["failed"]["hangs"]["log"][-1] == "the end"
    )
    assert found["fails"]["failed"]["fails"]["why"] == "exit code 3" and found["fails"]["figures"] == {"found": 7}
    assert found["passes"]["counts"] == {"passes": "3 passed in 1s"} and not (tmp_path / "late").exists()


def test_time_that_is_over_leaves_pieces_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "PIECES", {"one": lambda *a: Piece(30, {"one": [sys.executable, "-c", ""]})})
    options = argparse.Namespace(output=tmp_path, seconds=0.0, pieces=["one"], place=tmp_path)
    assert check_gpu.run(options) == 0
    assert json.loads((tmp_path / "check_gpu.json").read_text())["figures"]["pieces"]["one"]["verdict"] == "left out"


def test_what_failed_is_kept_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = argparse.Namespace(failed=True, longreprtext="why\n\nit failed", nodeid="a.py::b", when="call")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv(FAILURES, str(tmp_path / "kept"))
    check_gpu.pytest_runtest_logreport(said)
    assert (tmp_path / "kept").read_text() == "a.py::b (call)\n    why\n    it failed\n"
