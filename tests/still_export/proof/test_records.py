"""Records: written and read alike, refused where they were changed, old where other code would run today."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from still_export.errors import ConfigError
from still_export.proof import records
from still_export.proof.records import (
    Record,
    make_record,
    write_record,
)
from tools.verdicts import read_record, read_records, sum_up

RAN = {"graph": "0" * 64}


def proof(**changed: object) -> Record:
    given = {"subject": {"target": "onnx"}, "figures": {"logits_error": 1e-5}, "ran": RAN, "seed": 3}
    return make_record("proof", "small, float16", **{**given, "passed": True, **changed})  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = proof(command=["still-export", "verify", "a package"], versions={"driver": "580.1"})
    path = write_record(record, tmp_path / "proofs")
    assert path.name.startswith("small-float16-") and read_records(tmp_path / "proofs") == [record]
    assert record.command == "still-export verify 'a package'" and record.verdict == "passed"
    assert record.versions["driver"] == "580.1" and record.versions["python"].startswith(f"{sys.version_info[0]}.")
    assert record.machine.cores >= 1 and record.machine.memory_gib > 0
    assert proof(passed=False).verdict == "failed"
    assert make_record("benchmark", "a", {}, {}, {}).verdict == "measured"


def test_a_run_of_several_proofs_is_one_record() -> None:
    parts = [
        proof(
            figures={"worst_of_its_bound": share}, passed=share < 1, subject={"target": "onnx", "package": str(share)}
        )
        for share in (0.25, 1.5)
    ]
    made = sum_up("families", parts)
    assert (made.verdict, made.figures["checks"], made.figures["worst_of_its_bound"]) == ("failed", 2, 1.5)
    assert made.figures["failed"] == ["small, float16"] and made.subject == {"target": "onnx"}
    assert not made.ran, "files of packages stand in the rows"


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"verdict": "measured"}, "a proof passed or failed"),
        ({"verdict": "fine"}, "verdict"),
        ({"ran": {"graph": "1234"}}, r"ran\.graph"),
        ({"date": "2026-11-23T10:00:00"}, "no zone"),
        ({"more": 1}, "more"),
        ({"commit": 7}, "commit"),
        ({"figures": {"logits_error": 1e-6}}, "changed after it was written"),
    ],
)
def test_a_record_that_was_edited_is_refused(tmp_path: Path, changed: dict, message: str) -> None:
    path = write_record(proof(), tmp_path / "proofs")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ConfigError, match=rf"is no record: .*{message}"):
        read_record(path)


@pytest.mark.parametrize(
    "module, program",
    [
        ("tools.benchmarks.drift", "python -m tools.benchmarks.drift"),
        ("still_export.cli.main", "still-export"),
        ("", "still-export"),
    ],
)
def test_a_command_repeats_and_names_no_folder_of_this_machine(
    module: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "/home/me/bin/still-export",
        "prove",
        "/home/me/small",
        "--calls=/mnt/a/b.npz",
        "-o",
        "out/here",
        "http://a/v1",
    ]
    monkeypatch.setattr(sys, "argv", words)
    main = SimpleNamespace(__spec__=SimpleNamespace(name=module) if module else None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    made = make_record("benchmark", "n", {}, {}, {})
    assert made.command == f"{program} prove small --calls=b.npz -o out/here http://a/v1"


def test_sources_without_their_clone_say_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "__file__", str(tmp_path / "still_export/proof/records.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.delenv(records.COMMIT, raising=False)
    assert records.find_commit() is None
    monkeypatch.setenv(records.COMMIT, "0123456789ab")
    assert records.find_commit() == "0123456789ab"
