"""The portable package is the hub: every target lowered from it is the one that is exported directly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import still_export
from still_export.errors import ConfigError, PackageError
from still_export.graph.options import ExportOptions
from still_export.package.folder import Package
from still_export.targets.export import export_model
from still_export.targets.lower import lower
from still_export.targets.ort.options import OrtOptions
from still_export.targets.registry import target_of
from still_export.targets.trt.options import TrtOptions
from tests.still_export.conftest import Exporter

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "safetensors")))
from still_export.targets.trt import package
package._write_plugins = lambda *a, **k: {}
from still_export.targets.lower import lower
lower(sys.argv[1], sys.argv[2], sys.argv[3])
"""
"""Neither torch nor the model can be loaded; kernels are not compiled."""


@pytest.fixture(scope="module")
def portable(export_tiny: Exporter) -> Package:
    return export_tiny(dtype="float32")


def contents(folder: Path) -> dict[str, Any]:
    """Every file's bytes; the manifest without the command that made it."""
    found: dict[str, Any] = {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
    manifest = json.loads(found.pop("manifest.json"))
    del manifest["command"]
    return {**found, "manifest.json": manifest}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "genai", "web", "trt", "trt8", "trt-rtx"])
def test_lowered_is_exported_without_torch(
    portable: Package, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(portable.path), to, str(tmp_path / "lowered")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-800:]
    monkeypatch.setattr("still_export.targets.trt.package._write_plugins", lambda *a, **k: {})
    options = ExportOptions.from_manifest(portable.manifest)
    direct = export_model(options, tmp_path / "direct", to=to)
    lowered, expected = contents(tmp_path / "lowered"), contents(direct.path)
    assert lowered.keys() == expected.keys()
    assert [name for name in expected if lowered[name] != expected[name]] == []
    assert direct.manifest["portable"] == portable.manifest["portable"]


@pytest.mark.slow
def test_only_the_portable_package_is_lowered(portable: Package, tmp_path: Path) -> None:
    genai = lower(portable.path, "genai", tmp_path / "genai")
    with pytest.raises(PackageError, match=r"was lowered for genai.*portable\.onnx"):
        lower(genai.path, "trt-rtx", tmp_path / "rtx")
    assert not (tmp_path / "rtx").exists()
    with pytest.raises(ConfigError, match="--to tensorrt is unknown"):
        still_export.lower(portable.path, "tensorrt", tmp_path / "rtx")


def test_bits_are_chosen_at_export() -> None:
    manifest = {"model": {"dtype": "float16"}, "quantization": {"scheme": "int4", "nodes": "com.microsoft"}}
    target_of("genai").check_model({**manifest, "still": {}}, OrtOptions())
    with pytest.raises(ConfigError, match=r"int4 weights as com\.microsoft, trt-rtx as dequantized"):
        target_of("trt-rtx").check_model(manifest, TrtOptions("trt-rtx"))


@pytest.mark.slow
def test_every_step_is_dumped(portable: Package, tmp_path: Path) -> None:
    lower(portable.path, "onnx", tmp_path / "onnx", dump_dir=tmp_path / "steps")
    assert [p.name for p in sorted((tmp_path / "steps").iterdir())] == [
        "01_part_scales.onnx",
        "02_fuse_nodes.onnx",
        "03_strip_functions.onnx",
        "04_attach_own_functions.onnx",
    ]
