"""Records: written and read alike, refused where they were changed, stale where sources changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from still_export.errors import ConfigError
from still_export.proof import records
from still_export.proof.records import Record, hash_room, make_record, read_record, read_records, write_record


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own that a record covers."""
    folder = tmp_path / "covered_room"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernel.cpp").write_text("int one = 1;")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(records, "_hash_or_none", records._hash_or_none.__wrapped__)
    return folder


def proof(**changed: object) -> Record:
    given = {"subject": {"target": "onnx"}, "figures": {"logits_error": 1e-5}, "rooms": ["covered_room"], "seed": 3}
    return make_record("proof", "small, float16", **{**given, "passed": True, **changed})  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written(room: Path, tmp_path: Path) -> None:
    record = proof(command=["still-export", "verify", "a package"], versions={"driver": "580.1"})
    path = write_record(record, tmp_path / "proofs")
    assert path.name.startswith("small-float16-") and read_records(tmp_path / "proofs") == [record]
    assert record.command == "still-export verify 'a package'" and record.verdict == "passed"
    assert record.versions["driver"] == "580.1" and record.versions["python"].startswith(f"{sys.version_info[0]}.")
    assert record.machine.cores >= 1 and record.machine.memory_gib > 0
    assert proof(passed=False).verdict == "failed"
    assert make_record("benchmark", "a", {}, {}, ["plugins"]).verdict == "measured"


def test_records_of_changed_sources_are_stale(room: Path) -> None:
    record = proof(rooms=["covered_room", "still_export.errors"])
    assert record.stale_rooms() == []
    before = hash_room("covered_room")
    (room / "__pycache__").mkdir()
    (room / "__pycache__/a.pyc").write_bytes(b"1")
    assert hash_room("covered_room") == before
    (room / "kernel.cpp").write_text("int one = 2;")
    assert record.stale_rooms() == ["covered_room"]
    (room / "kernel.cpp").write_text("int one = 1;")
    (room / "kernel.cpp").rename(room / "other.cpp")
    assert record.stale_rooms() == ["covered_room"]


def test_a_room_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"still_export\.nowhere: no package"):
        proof(rooms=["still_export.nowhere"])


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"verdict": "measured"}, "a proof passed or failed"),
        ({"verdict": "fine"}, "verdict"),
        ({"sources": {"still_export": "1234"}}, r"sources\.still_export"),
        ({"date": "2026-11-23T10:00:00"}, "no zone"),
        ({"more": 1}, "more"),
        ({"commit": 7}, "commit"),
        ({"figures": {"logits_error": 1e-6}}, "changed after it was written"),
    ],
)
def test_a_record_that_was_edited_is_refused(room: Path, tmp_path: Path, changed: dict, message: str) -> None:
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
    module: str, program: str, room: Path, monkeypatch: pytest.MonkeyPatch
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
    made = make_record("benchmark", "n", {}, {}, ["covered_room"])
    assert made.command == f"{program} prove small --calls=b.npz -o out/here http://a/v1"


def test_sources_without_their_clone_say_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "__file__", str(tmp_path / "still_export/proof/records.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.delenv(records.COMMIT, raising=False)
    assert records.find_commit() is None
    monkeypatch.setenv(records.COMMIT, "0123456789ab")
    assert records.find_commit() == "0123456789ab"
