"""What a machine shows of a package, and the ledger that keeps it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest

from still_export.cli.main import main
from still_export.errors import ConfigError, PackageError
from still_export.evaluation.prove import ProveOptions, prove, rooms_of
from still_export.package.files import MANIFEST, MODEL
from still_export.package.folder import write_manifest
from still_export.proof import records
from still_export.proof.ledger import newest, table
from still_export.proof.records import hash_room, make_record, read_records
from still_export.targets.registry import TARGETS
from tests.still_export.conftest import Exporter

pytestmark = pytest.mark.slow


def code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def test_a_package_is_proven_and_measured(
    export_tiny: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = export_tiny().path
    assert code("prove", package, "--lengths", "20,40", "-q", "-o", tmp_path) == 0
    said = capsys.readouterr().out
    (record,) = read_records(tmp_path)
    assert said.startswith("passed: cases ") and "not shown" not in said
    assert (record.kind, record.verdict, record.subject["target"]) == ("proof", "passed", "ort-cpu")
    assert record.figures["decode_ms_at_20"] > 0 < record.figures["prefill_s_at_40"]
    assert 0 < record.figures["worst_of_its_bound"] <= 1 and record.stale_rooms() == []
    assert {"still_export.runtime", "still_export.targets.ort"} <= set(record.sources)


def test_a_record_covers_what_its_target_depends_on() -> None:
    """A package's C++ counts where it has some; what other targets have does not."""
    rooms = {t.name: set(rooms_of(t, t.runtime, {})) for t in TARGETS if t.runtime is not None}
    for name, held in rooms.items():
        assert all(map(hash_room, held)), name
        assert ("plugins" in held) == name.startswith("trt") and {"still_kernels", "still_graphs"} <= held
    assert (
        "still_export.targets.ort" in rooms["genai"] and "still_export.targets.trt" in rooms["trt8"] - rooms["ort-cpu"]
    )
    ort = next(t for t in TARGETS if t.name == "ort-cpu")
    assert ort.runtime is not None and "plugins" in rooms_of(ort, ort.runtime, {"native": {"library": "lib.so"}})


def test_without_its_model_a_package_is_measured_alone(export_tiny: Exporter, tmp_path: Path) -> None:
    proven = prove(export_tiny().path, ProveOptions(model=str(tmp_path / "nowhere"), lengths=(20,)))
    assert (proven.record.kind, proven.record.verdict) == ("benchmark", "measured")
    assert len(proven.missing) == 1 and "comparison with PyTorch" in proven.missing[0]
    assert "cases" not in proven.record.figures


def test_a_package_that_computes_something_else_fails(export_tiny: Exporter, tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(export_tiny().path, folder)
    graph = onnx.load(folder / MODEL, load_external_data=False)
    epsilon = next(a for n in graph.graph.node for a in n.attribute if a.name == "epsilon")
    epsilon.f = 0.5
    onnx.save(graph, folder / MODEL)
    manifest = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, {k: v for k, v in manifest.items() if k not in ("format_version", "versions", "files")})
    assert code("prove", folder, "--lengths", "20", "-q", "-o", tmp_path / "proofs") == 1
    (record,) = read_records(tmp_path / "proofs")
    assert record.verdict == "failed" and record.figures["worst_of_its_bound"] > 1
    assert ", error of row [" in record.figures["failure"] and "bound" in record.figures["failure"]


def test_the_ledger_shows_the_newest_and_what_went_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = ["still_export.errors", "still_export.version"]
    subject = {"package": "small", "target": "ort-cpu", "dtype": "float16", "provider": "cpu", "of": "a|b"}
    old, new = (make_record("proof", "prove", subject, {"cases": n, "rows": [1]}, rooms, True) for n in (1, 2))
    other = make_record("benchmark", "prefill", {}, {"ms": 1.23456}, rooms)
    assert newest([old, new, other]) == [other, new]
    text = table([old, new, other])
    assert "small, of a\\|b | ort-cpu on cpu | float16 | passed | cases 2 |" in text and "ms 1.23" in text
    assert "stale" not in text
    monkeypatch.setattr(
        records, "_hash_or_none", lambda room: "0" * 64 if room.endswith("errors") else new.sources[room]
    )
    assert table([new]).count("**stale** |") == 1


def test_refusals(tmp_path: Path, export_tiny: Exporter) -> None:
    with pytest.raises(PackageError):
        prove(tmp_path)
    with pytest.raises(ConfigError, match=r"device|provider"):
        prove(export_tiny().path, ProveOptions(provider="tpu"))
