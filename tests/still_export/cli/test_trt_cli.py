"""The command line for TensorRT: what it writes, and what it says where nothing can be built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from still_export.cli.output import next_commands
from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions
from still_export.loading.runtimes import runtime_of
from still_export.package.folder import Package
from still_export.targets.export import export
from still_export.targets.trt.options import TrtOptions
from still_export.targets.trt.plugins import PluginBuildError
from tests.still_export.packages import needs_rtx, onnx_package, trt_package
from tests.still_export.verbs import call as run


@pytest.mark.slow
def test_build_without_tensorrt_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    assert run("build", package.path) == 2
    assert f"still-export build {package.path}" in capsys.readouterr().err.replace("\n", " ")
    assert run("run", package.path, "--prompt", "a") == 2
    assert "has no engine yet" in capsys.readouterr().err
    assert run("build", onnx_package(tmp_path / "onnx").path) == 2


@pytest.mark.slow
def test_runtimes_and_packages_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = onnx_package(tmp_path / "onnx").path
    assert run("run", package, "--runtime", "trt", "--prompt", "a") == 2
    assert "a package for onnx does not run with --runtime trt" in capsys.readouterr().err


def test_tensorrt_rtx_packages_are_built_only() -> None:
    """No verb is recommended, or half tried, that does not take them."""
    assert "still-export" not in next_commands(Path("p"), "trt-rtx")
    assert "still-export run 'my p'" in next_commands(Path("my p"), "trt")
    assert runtime_of("onnx", None).name == "ort" and runtime_of("trt", "trt").name == "trt"
    for target, asked in (("trt-rtx", None), ("trt-rtx", "trt"), ("trt", "ort")):
        with pytest.raises(ConfigError, match=f"a package for {target}"):
            runtime_of(target, asked)


@pytest.mark.slow
def test_one_dtype_at_a_time(tmp_path: Path) -> None:
    assert run("model", "--to", "trt", "--fp16", "--bf16", "-o", tmp_path / "x") == 2
    assert run("model", "--to", "tensorrt", "-o", tmp_path / "x") == 2


@pytest.mark.slow
def test_a_package_without_plugin_library_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its engine cannot be built or run without one, which would come out on the GPU's machine only."""
    package = trt_package(tmp_path / "trt", monkeypatch)
    monkeypatch.setattr("still_export.targets.export.export", lambda *_, **__: package)
    monkeypatch.setattr("still_export.proof.overflow.overflow_of", lambda *_: None)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    for plugins in (package.manifest["plugins"], {}):
        package.manifest["plugins"] = plugins
        assert run("maker/model", "--to", "trt", "-o", tmp_path / "x") == 0
        shown = capsys.readouterr()
        assert ("--tensorrt-include" in shown.err) == (not plugins)
        assert "no engine yet" in shown.out


def test_a_folder_without_headers_is_refused_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("still_export.targets.export.write_portable", lambda *_, **__: pytest.fail("exported first"))
    trt = TrtOptions("trt", tensorrt_include=(str(tmp_path),))
    with pytest.raises(PluginBuildError, match="NvInfer"):
        export(ExportOptions("model"), tmp_path / "x", to="trt", options=trt)


@needs_rtx
@pytest.mark.slow
@pytest.mark.long
def test_a_real_model_becomes_a_tensorrt_rtx_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).resolve().parents[4] / "shared/models/stories260K"
    if not model.is_dir():
        pytest.skip("needs the shared models")
    options = ("--attach-untrained", "--capacity-tokens", 512, "--chunk-size", 16, "--salient-per-chunk", 2)
    trt = (
        "--to",
        "trt-rtx",
        "--arch",
        "sm_89",
        "--prefill-tokens",
        64,
        "--batch",
        2,
        "--dump-dir",
        tmp_path / "passes",
    )
    assert run(model, *trt, *options, "-o", tmp_path / "rtx", "--json", "--quiet") == 0
    assert [Path(e).name for e in json.loads(capsys.readouterr().out)["engines"]] == ["engine-rtx.plan"]
    dumped = sorted(path.name for path in (tmp_path / "passes").iterdir())
    assert dumped[:3] == ["01_lower_program.onnx", "02_attach_functions.onnx", "03_inline_functions.onnx"]
    assert onnx.load(tmp_path / "passes" / dumped[-1]).graph.node


@pytest.mark.slow
def test_a_manifest_repeats_its_target_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    path = package.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"] = {"model": "somewhere", "dtype": "bfloat16", "overlays": []}
    manifest["trt"] |= {"archs": ["sm_87"], "prefill_tokens": 64}
    path.write_text(json.dumps(manifest))
    seen: list[Any] = []

    def export(asked: Any, *_: Any, options: Any, **more: Any) -> Package:
        seen.extend([asked, options])
        return package

    monkeypatch.setattr("still_export.targets.export.export", export)
    monkeypatch.setattr("still_export.proof.overflow.overflow_of", lambda *_: None)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    assert run("export", "--config", path, "-o", tmp_path / "again", "--batch", 5, "--quiet") == 0
    options, trt = seen
    assert (options.model, options.dtype) == ("somewhere", "bfloat16")
    assert (trt.target, trt.archs, trt.prefill_tokens, trt.batch) == ("trt", ("sm_87",), 64, 5)
    (tmp_path / "broken.json").write_text("[")
    assert run("export", "--config", tmp_path / "broken.json", "-o", tmp_path / "again") == 2
