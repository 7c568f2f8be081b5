"""Building engines: TensorRT-RTX for real, which needs no GPU; the checks around TensorRT with a stand-in for its module."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import onnx
import pytest

from still_export.build import BuildOptions, build_engines
from still_export.engine_builder import BuildError, EngineBuilder, NoBuilderError, plugin_layers, write_atomically
from still_export.errors import ConfigError, PackageError
from still_export.package import Package, open_package, write_manifest
from still_export.trt_options import TrtOptions
from still_export.trt_package import kernel_variants, lower_package
from still_graphs.pipelines import run_pipeline
from tests.still_graphs.small_graph import SALIENT, SIZES, small_graph, state_shape, state_type, states

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs tensorrt-rtx-cu13-libs and -bindings"
)


def onnx_package(folder: Path, dtype: str = "float16") -> Package:
    """An ONNX package of the small graph, without a tokenizer."""
    folder.mkdir(parents=True)
    onnx.save(small_graph(dtype), folder / "model.onnx")
    (folder / "run_ort.py").write_text("")
    types_ = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16"}
    manifest = {
        "target": "onnx",
        "model": {"dtype": dtype, "vocab_size": 23, "all_logits": True, "layers": 1},
        "capacity": {
            "capacity_tokens": 12 * SIZES["C"],
            "chunk_size": SIZES["C"],
            "salient_per_chunk": SALIENT,
            "overflow": "error",
        },
        "prefill_tokens": 16,
        "states": [
            {
                "name": f"{name}.0",
                "layer": 0,
                "shape": state_shape(name),
                "dtype": types_[state_type(name, dtype)],
                "in_place": False,
            }
            for name in states()
        ],
    }
    write_manifest(folder, manifest)
    return open_package(folder)


def rtx_package(folder: Path, **options: Any) -> Package:
    folder.mkdir(parents=True)
    trt = TrtOptions("trt-rtx", **{"prefill_tokens": 32, "batch": 2, "archs": ("sm_89",)} | options)
    return lower_package(onnx_package(folder / "portable"), trt, folder)


def trt_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A lowered package for TensorRT whose kernels were not compiled."""
    monkeypatch.setattr("still_export.trt_package._write_plugins", lambda *a: {"10": "libstill_tensorrt10.so"})
    folder.mkdir(parents=True)
    return lower_package(onnx_package(folder / "portable"), TrtOptions("trt", batch=2), folder)


@needs_rtx
def test_tensorrt_rtx_reads_and_builds_the_graph(tmp_path: Path) -> None:
    package = rtx_package(tmp_path / "rtx")
    steps: list[str] = []
    (engine,) = build_engines(package, progress=steps.append)
    assert engine.stat().st_size > 10_000 and "building the engine" in steps
    assert any(step.startswith("building the engine: ") and " of " in step for step in steps)
    manifest = open_package(package.path).manifest  # every hash right, the engine's among them
    (entry,) = manifest["engines"]
    assert entry["file"] == "engine-rtx.plan" and entry["archs"] == ["sm_89"] and entry["batch"] == 2
    assert manifest["files"]["engine-rtx.plan"]["size_bytes"] == entry["size_bytes"] == engine.stat().st_size
    assert "Engine generation completed" in (package.path / "build.log").read_text()


@needs_rtx
def test_a_graph_that_tensorrt_refuses_is_quoted(tmp_path: Path) -> None:
    package = rtx_package(tmp_path / "rtx")
    graph = onnx.load(package.model_path)
    graph.graph.node[0].op_type = "Unheard"
    onnx.save(graph, package.model_path)
    with pytest.raises(BuildError, match=r"refused .*model\.onnx:\n(.*\n)*.*Unheard"):
        build_engines(Package(package.path, package.manifest))
    assert not (package.path / "engine-rtx.plan").exists()


@needs_rtx
def test_unknown_architectures_of_rtx_are_named(tmp_path: Path) -> None:
    package = rtx_package(tmp_path / "rtx", archs=("sm_90",))
    with pytest.raises(BuildError, match=r"sm_90 is no architecture of TensorRT-RTX .*SM89"):
        build_engines(package)


def test_without_tensorrt_the_package_is_complete_and_says_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    assert package.manifest["plugin_layers"] == {"HybridAttention": 1} and package.manifest["engines"] == []
    assert all(s["in_place"] for s in package.manifest["states"])
    assert (package.path / "run_trt.py").is_file()
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(NoBuilderError, match=f"still-export build {package.path}"):
        build_engines(package)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", types.SimpleNamespace(__version__="10.3.0"))
    monkeypatch.setattr("still_export.build.has_gpu", lambda: False)
    with pytest.raises(NoBuilderError, match="no CUDA device"):
        build_engines(package)


def test_only_packages_with_engines_are_built(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="is a package for onnx, which has no engines"):
        build_engines(onnx_package(tmp_path / "onnx"))


def test_options_are_checked(tmp_path: Path) -> None:
    for change, message in (
        ({"target": "tensorrt"}, "known: trt, trt-rtx"),
        ({"batch": 0}, "batch=0"),
        ({"prefill_tokens": 1}, "no prefill profile"),
        ({"workspace_mib": -1}, "must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrtOptions(**change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch=0"):
        build_engines(rtx_package(tmp_path / "rtx"), BuildOptions(batch=0))


def test_a_missing_plugin_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    monkeypatch.setattr("still_export.build.has_gpu", lambda: True)
    module = types.SimpleNamespace(__version__="11.1.0", ILogger=object)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", module)
    with pytest.raises(
        BuildError, match=r"no plugin library for TensorRT 11\.1\.0, only for 10\. .*--tensorrt-include"
    ):
        build_engines(package)
    module.__version__ = "10.3.0"
    with pytest.raises(BuildError, match=r"libstill_tensorrt10\.so is missing \(searched there only\).*--plugin"):
        build_engines(package)


def inspected(*layers: dict[str, str] | str) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": []})


def test_every_still_node_must_be_a_plugin_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    plugin = {"Name": "attention", "LayerType": "PluginV3", "PluginType": "HybridAttention"}
    second = {**plugin, "Name": "attention [profile 1]"}
    assert plugin_layers(inspected(plugin, second, {"Name": "mul"}, "names only")) == {"HybridAttention": 1}

    def builder(layers: str) -> EngineBuilder:
        inspector = types.SimpleNamespace(get_engine_information=lambda form: layers)
        engine = types.SimpleNamespace(create_engine_inspector=lambda: inspector)
        runtime = types.SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
        module = types.SimpleNamespace(
            __version__="10.3.0",
            ILogger=object,
            Runtime=lambda logger: runtime,
            LayerInformationFormat=types.SimpleNamespace(JSON=0),
        )
        made = EngineBuilder(module, package, TrtOptions(), print)
        made.logger = None
        return made

    builder(inspected(plugin, second))._check_plugin_layers(b"")
    with pytest.raises(BuildError, match="1 nodes of HybridAttention became 0 plugin layers"):
        builder(inspected({"Name": "mul", "LayerType": "kgen"}))._check_plugin_layers(b"")


def test_kernels_of_a_graph() -> None:
    model = small_graph("float16")
    run_pipeline(model, "trt")
    (variant,) = kernel_variants(model)
    assert (variant.dtype, variant.head_dim, variant.feature_rows, variant.chunk_size) == ("float16", 4, 5, 8)
    assert (variant.gate, variant.window_factor, variant.count_dtype, variant.select_scope) == (1, 0, "int32", "q_head")


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "engine.plan"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, memoryview(b"new"))
    assert path.read_bytes() == b"new"


def test_building_and_running_need_no_torch() -> None:
    block = "import sys; sys.modules.update(torch=None, transformers=None, onnx=None, typer=None)"
    code = f"{block}; import still_export.build, still_export.runners.tensorrt"
    subprocess.run([sys.executable, "-c", code], check=True)
