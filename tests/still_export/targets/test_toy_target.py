"""A new target is its own folder and a line in the registry: flags, export, lowering, refusals, runner and proof ask its record."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import still_export
from still_export.cli.main import app
from still_export.package.folder import Package, open_package
from still_export.targets import registry
from tests.still_export.conftest import Exporter
from tests.still_export.verbs import call
from tests.toy_target.target import TOY


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "TARGETS", (*registry.TARGETS, TOY))
    app.cache_clear()
    yield
    app.cache_clear()


@pytest.fixture(scope="module")
def portable(export_tiny: Exporter) -> Package:
    return export_tiny(dtype="float32")


@pytest.mark.slow
def test_it_is_lowered_run_and_proven(portable: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--toy-note", "seen", "-o", tmp_path / "toy")
    assert call("lower", portable.path, "--to", "toy", *flags, "--quiet") == 0, capsys.readouterr().err
    toy = open_package(tmp_path / "toy")
    graph = onnx.load(toy.model_path, load_external_data=False).graph
    assert (toy.path / "note.txt").read_text() == f"seen: {len(graph.node)} nodes\n"
    assert toy.manifest["target"] == "toy" and not any(node.domain == "still" for node in graph.node)
    prompt = np.arange(3, 12)
    answers = [still_export.load(p, threads=1).runner.prefill(prompt) for p in (toy.path, portable.path)]
    np.testing.assert_allclose(*answers, atol=1e-4)
    assert call("verify", toy.path, "--lengths", "1,17", "--quiet") == 0, capsys.readouterr().out


@pytest.mark.slow
def test_it_is_exported_as_it_is_lowered(portable: Package, tmp_path: Path) -> None:
    config = portable.path / "manifest.json"
    assert call("export", "--config", config, "--to", "toy", "-o", tmp_path / "direct", "--quiet") == 0
    still_export.lower(portable.path, "toy", tmp_path / "lowered")
    for name in ("model.onnx", "model.onnx.data", "note.txt"):
        assert (tmp_path / "direct" / name).read_bytes() == (tmp_path / "lowered" / name).read_bytes()
    again = (
        "export",
        "--config",
        tmp_path / "direct" / "manifest.json",
        "--toy-note",
        "again",
        "-o",
        tmp_path / "again",
    )
    assert call(*again, "--quiet") == 0
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["config"]["toy_note"] == "again"


def test_its_flags_are_in_a_group_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for verb in ("export", "lower"):
        assert call(verb, "--help") == 0
        assert re.search(
            r"With --to toy ─+╮\n│ --toy-note +<str> +What the note of the package says\.", capsys.readouterr().out
        )
    assert call("maker/model", "--toy-note", "x", "-o", tmp_path / "x") == 2
    assert "--toy-note: for --to toy, not for --to onnx." in capsys.readouterr().err
    assert call("maker/model", "--to", "toy", "--batch", "2", "-o", tmp_path / "x") == 2
    assert "--batch: for --to trt and trt-rtx, not for --to toy." in capsys.readouterr().err
