"""Licence and base models: read of model cards and GGUF keys, kept in the manifest, the graph and component.json, and derived again."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import onnx
import pytest

from still_export.folders.files import Files
from still_export.folders.model import ModelFolder
from still_export.folders.origin import LONGEST, MOST, card_origin, model_license
from still_export.graph.options import ExportOptions
from still_export.package.files import COMPONENT, MODEL, PORTABLE
from still_export.package.folder import open_package
from still_export.proof.derived import check_derived
from still_export.targets.export import export
from still_export.targets.lower import lower
from still_export.targets.ort.options import OrtOptions
from tests.still_export.tiny import still_model

CARD = "---\nlicense: other\nlicense_name: own\nlicense_link: https://example.org/l\nbase_model: a/b\ntags: [x]\n---\n# M\n"
STATED = {"license": "other", "license_name": "own", "license_link": "https://example.org/l", "base_model": ["a/b"]}


@pytest.mark.parametrize(
    ("card", "found"),
    [
        (CARD, STATED),
        (
            "---\nlicense:\n- mit\n- apache-2.0\nbase_model: [a/b, c/d]\n---\n",
            {"license": "mit", "base_model": ["a/b", "c/d"]},
        ),
        ('---\nlicense: 3\nbase_model: {a: b}\nname: "\\e[2Jx\\n"\n---\n', {"name": "[2Jx"}),
        (
            f"---\nlicense: {'x' * 999}\nbase_model: {['y'] * 99}\n---\n",
            {"license": "x" * LONGEST, "base_model": ["y"] * MOST},
        ),
        ("# no header\nlicense: mit\n", {}),
        ("", {}),
    ],
)
def test_a_model_card_is_read(card: str, found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card)
    assert card_origin(Files(tmp_path)) == found


@pytest.mark.parametrize(
    "card",
    [b"---\nlicense: [\n---\n", b"---\n- a\n---\n", b"---\nlicense: \xff\n---\n", b"---\n" + b"[" * 9999 + b"\n---\n"],
)
def test_a_damaged_card_costs_the_licence_alone(card: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "README.md").write_bytes(card)
    with caplog.at_level(logging.WARNING):
        assert card_origin(Files(tmp_path)) == {}
    assert "no licence" in caplog.text


def test_keys_of_a_gguf_file_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_name("M")
    writer.add_license("mit")
    writer.add_base_model_count(2)
    writer.add_base_model_repo_url(0, "https://example.org/a")
    writer.add_base_model_name(1, "B")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = ModelFolder(tmp_path / "m.gguf").origin
    assert found == {"name": "M", "license": "mit", "base_model": ["https://example.org/a", "B"]}


def test_onnx_gets_the_licence_by_its_known_name() -> None:
    assert [model_license(o) for o in ({}, {"license": "mit"}, STATED, {"license": "other"})] == [
        "",
        "mit",
        "https://example.org/l",
        "other",
    ]


def _entries(folder: Path, name: str) -> dict[str, str]:
    return {e.key: e.value for e in onnx.load(folder / name, load_external_data=False).metadata_props}


def _wrong(folder: Path, model: Path) -> list[str]:
    package = open_package(folder)
    verdict = check_derived(package, ExportOptions(str(model))).verdict
    return [str(check) for check in verdict.checks if not check.passed]


def test_a_package_states_its_origin_and_is_derived_with_it(tmp_path: Path) -> None:
    model, bare, other = tmp_path / "model", tmp_path / "bare", tmp_path / "other"
    still_model("llama").save_pretrained(model)
    shutil.copytree(model, bare)
    shutil.copytree(model, other)
    (model / "README.md").write_text(CARD)
    (other / "README.md").write_text("---\nlicense: mit\n---\n")
    package = export(ExportOptions(str(model)), tmp_path / "package", options=OrtOptions(native=False))
    manifest, folder = package.manifest, package.path
    assert manifest["origin"] == STATED
    for name in (MODEL, PORTABLE):
        assert _entries(folder, name)["model_license"] == "https://example.org/l"
        assert json.loads(_entries(folder, name)["still.origin"]) == STATED
    assert json.loads(_entries(folder, MODEL)["still.portable"]) == manifest["portable"]

    component = json.loads((folder / COMPONENT).read_text())
    (variant,) = component["variants"].values()
    assert (variant["ep"], variant["device"]) == ("CPUExecutionProvider", "cpu")
    assert (folder / variant["variant_directory"] / variant["executor_info"]["ort"]["model_file"]).is_file()
    assert component["additional_metadata"]["origin"] == STATED

    assert _wrong(folder, model) == _wrong(folder, bare) == []  # a copy without its card is the same model
    assert "origin" in " ".join(_wrong(folder, other))
    web = lower(folder, "web", tmp_path / "web")
    assert web.manifest["origin"] == STATED and COMPONENT not in web.manifest["files"]
