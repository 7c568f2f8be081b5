"""The newest verdicts: one row a target, machine, subject and type; which are old, and why."""

import tarfile
from pathlib import Path
from typing import Any

import pytest

from still_export.proof.records import Record, make_record, write_record
from tools import verdicts


def proof(name: str = "small", passed: bool = True, share: float = 0.5, **changed: str) -> Record:
    subject = {"target": "ort-cpu", "dtype": "float16", "provider": "cpu", **changed}
    figures = {"worst_of_its_bound": share}
    return make_record("proof", name, subject, figures, {"graph": "0" * 64}, passed)


def test_the_rows_of_the_file_are_whole() -> None:
    rows = verdicts.read_rows(verdicts.VERDICTS)
    keys = [tuple(row[name] for name in verdicts.KEY) for row in rows]
    assert keys == sorted(set(keys)) and len(keys) <= 60
    for row in rows:
        assert set(row) == set(verdicts.row_of([proof()])) and row["verdict"] in ("passed", "failed")
        assert not row["command"].count("/tmp")


def test_a_newer_run_takes_the_place_of_an_older_one() -> None:
    rows = verdicts.taken_in([], [proof(), proof(passed=False, dtype="float32"), proof("other")])
    assert [(row["subject"], row["type"], row["verdict"]) for row in rows] == [
        ("other", "float16", "passed"), ("small", "float16", "passed"), ("small", "float32", "failed"),
    ]  # fmt: skip
    rows = verdicts.taken_in(rows, [proof(share=0.75), proof(share=0.25)])
    (row,) = (row for row in rows if (row["subject"], row["type"]) == ("small", "float16"))
    assert (row["checks"], row["margin"]) == (2, 0.75)
    assert len(verdicts.taken_in(rows, [make_record("benchmark", "fast", {}, {}, {})])) == 3
    assert verdicts.taken_in([{**row, "date": "2999-01-01"}], [proof()])[0]["date"] == "2999-01-01"


def test_targets_are_told_apart() -> None:
    trt8 = proof(target="trt").model_copy(update={"versions": {"tensorrt": "8.6.1"}})
    cases = [(proof(target="onnx", provider="cuda"), "ort-cuda"), (proof(target="trt"), "trt"), (trt8, "trt8")]
    for record, expected in [(proof(), "ort-cpu"), *cases]:
        assert verdicts.row_of([record])["target"] == expected


def test_old_rows_are_of_another_judge() -> None:
    row = verdicts.row_of([proof()])
    assert verdicts.state_of(row) == "current" and verdicts.state_of({**row, "judge": None}).startswith("unknown")
    assert verdicts.state_of({**row, "judge": 0}) == "old: judge"


def test_the_tool_takes_records_in_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, archive = tmp_path / "verdicts.json", tmp_path / "records.tar.gz"
    monkeypatch.setattr(verdicts, "VERDICTS", file)
    file.write_text("[]")
    made: list[Any] = [write_record(proof(name), tmp_path) for name in ("a", "b")]
    for path in (*made, made[0]):
        verdicts.main([str(path), "--archive", str(archive)])
    with tarfile.open(archive) as kept:
        assert sorted(kept.getnames()) == sorted(path.name for path in made)
    capsys.readouterr()
    verdicts.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("ort-cpu, ") and lines[0].endswith("; current")
    verdicts.main(["--old"])
    assert not capsys.readouterr().out
    monkeypatch.setattr(verdicts, "PROOF_VERSION", 0)
    verdicts.main(["--old"])
    assert [line.endswith("; old: judge") for line in capsys.readouterr().out.splitlines()] == [True, True]
    made[0].write_text(made[0].read_text().replace("0.5", "0.25"))
    with pytest.raises(SystemExit, match=r"^2$"):
        verdicts.main([str(made[0])])
    assert "changed after it was written. Make it again" in " ".join(capsys.readouterr().err.split())
