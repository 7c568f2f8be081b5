"""What a machine shows of a package, and the record of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from still_export.errors import ConfigError, PackageError
from still_export.evaluation.prove import ProveOptions, prove
from still_export.package.files import MANIFEST, MODEL, sha256
from still_export.package.folder import write_manifest
from still_export.proof import package as proof
from still_export.proof.constants import PROOF_VERSION
from tests.still_export.conftest import Exporter
from tests.still_export.verbs import call
from tools.verdicts import read_records

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than users are asked: across two chunks, and a promotion within steps."""
    found = proof.packaged_target
    monkeypatch.setattr("still_export.proof.prompts.MOST_TOKENS", 200)
    monkeypatch.setattr("still_export.proof.prompts.LEAST_TOKENS", 100)
    monkeypatch.setattr(proof, "packaged_target", lambda manifest: replace(found(manifest), decode_steps=9))


def test_a_package_is_proven_and_measured(
    export_tiny: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = export_tiny().path
    assert call("prove", package, "--lengths", "20,40", "-q", "-o", tmp_path) == 0
    said = capsys.readouterr().out
    (record,) = read_records(tmp_path)
    assert said.startswith("passed: cases ") and "not shown" not in said
    assert (record.kind, record.verdict, record.subject["target"]) == ("proof", "passed", "ort-cpu")
    speed: Any = record.figures["speed"]
    assert [(row["length"], row["rounds"]) for row in speed["rows"]] == [(20, 3), (40, 3)] and speed["load"] in said
    assert speed["rows"][0]["decode_ms"] > 0 < speed["rows"][1]["prefill_s"] and speed["rows"][0]["decode_spread"] >= 0
    assert 0 < record.figures["worst_of_its_bound"] <= 1 and record.judge == PROOF_VERSION
    assert record.ran["graph"] == sha256(package / MODEL)
    (model,) = record.inputs
    assert (
        model["role"] == "model" and len(model["sha256"]) == 64 and "no signature" in record.worth and record.not_asked
    )


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
    assert call("prove", folder, "--lengths", "20", "-q", "-o", tmp_path / "proofs") == 1
    (record,) = read_records(tmp_path / "proofs")
    assert record.verdict == "failed" and record.figures["worst_of_its_bound"] > 1
    assert ", row [" in record.figures["failure"] and "bound" in record.figures["failure"]


def test_refusals(tmp_path: Path, export_tiny: Exporter) -> None:
    with pytest.raises(PackageError):
        prove(tmp_path)
    with pytest.raises(ConfigError, match=r"device|provider"):
        prove(export_tiny().path, ProveOptions(provider="tpu"))
