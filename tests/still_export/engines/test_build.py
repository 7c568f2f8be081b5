"""Building engines: TensorRT-RTX for real, which needs no GPU; the checks around TensorRT with a stand-in for its module."""

import json
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from still_export.engines.build import BuildOptions, build_engines, reopen
from still_export.engines.builder import plugin_layers, runs_on, write_atomically
from still_export.errors import ConfigError, PackageError, UnsupportedError
from still_export.package.folder import Package, open_package, write_manifest
from still_export.package.trust import trust_package
from still_export.runtime.tensorrt import TrtModel
from still_export.runtime.trt_engine import TrtError
from still_export.targets.registry import target_of
from still_export.targets.target import BuildError, NoBuilderError
from still_export.targets.trt import plugins
from still_export.targets.trt.options import TrtOptions
from still_export.targets.trt.package import kernel_variants
from tests.still_export import fake_tensorrt
from tests.still_export.packages import needs_rtx, onnx_package, rtx_package, trt_package
from tests.still_graphs.passes import run_passes
from tests.still_graphs.protos import drop_attribute
from tests.still_graphs.small_graph import SALIENT, small_graph


@pytest.mark.slow
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
    with pytest.raises(BuildError, match=r"sm_90 of TensorRT-RTX .* is unknown.*SM89"):
        build_engines(package)


def test_without_tensorrt_the_package_is_complete_and_says_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    assert (
        package.manifest["plugin_layers"] == {"HybridAttention": 1, "DenseMatMul": 4}
        and package.manifest["engines"] == []
    )
    assert all(s["in_place"] for s in package.manifest["states"])
    assert (package.path / "run_trt.py").is_file()
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(NoBuilderError, match=f"still-export build {package.path}"):
        build_engines(package)
    monkeypatch.delitem(__import__("sys").modules, "tensorrt")
    (tmp_path / "path/tensorrt").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "path")
    with pytest.raises(NoBuilderError, match="a folder of that name lies on the path"):
        build_engines(package)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", types.SimpleNamespace(__version__="10.3.0"))
    monkeypatch.setattr("still_export.engines.build.has_gpu", lambda: False)
    with pytest.raises(NoBuilderError, match="no CUDA device"):
        build_engines(package)


def test_only_packages_with_engines_are_built(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="is a package for onnx, which has no engines"):
        build_engines(onnx_package(tmp_path / "onnx"))


def test_options_are_checked(tmp_path: Path) -> None:
    for change, message in (
        ({"target": "tensorrt"}, "known: trt"),
        ({"batch": 0}, "--batch 0"),
        ({"prefill_tokens": 1}, "--prefill-tokens 1: it must be at least 2"),
        ({"workspace_mib": -1}, "--workspace -1"),
        ({"optimization_level": 6}, "--optimization-level 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrtOptions(**change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--batch 0"):
        build_engines(rtx_package(tmp_path / "rtx"), BuildOptions(batch=0))


def test_headers_of_cuda_are_found_among_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are whole, else the package that lacks is named; those of the system come first."""

    def install(*names: str) -> None:
        for name in names:
            path = tmp_path / "nvidia" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    packages = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(plugins, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: packages)))
    monkeypatch.setattr(plugins, "USUAL_CUDA_INCLUDES", ())
    with pytest.raises(
        plugins.PluginBuildError, match=r"pip install nvidia-cuda-runtime nvidia-cuda-crt, or .*--cuda-include"
    ):
        plugins.cuda_headers()
    twelve, part = (tmp_path / "nvidia" / name / "include" for name in ("cuda_runtime", "cuda_nvcc"))
    install("cuda_runtime/include/cuda_runtime_api.h")
    with pytest.raises(plugins.PluginBuildError, match="pip install nvidia-cuda-nvcc-cu12"):
        plugins.cuda_headers()
    install("cuda_nvcc/include/crt/host_defines.h")
    assert plugins.cuda_headers() == [twelve, part]
    install("cu13/include/cuda_runtime_api.h")
    assert plugins.cuda_headers() == [twelve, part], "that of 13 is not whole"
    install("cu13/include/crt/host_defines.h")
    thirteen = tmp_path / "nvidia/cu13/include"
    assert plugins.cuda_headers() == [thirteen]
    (twelve / "cuda_runtime_api.h").unlink()
    assert plugins.cuda_headers() == [thirteen]
    (thirteen / "crt/host_defines.h").unlink()
    with pytest.raises(plugins.PluginBuildError, match="pip install nvidia-cuda-crt"):
        plugins.cuda_headers()
    monkeypatch.setattr(plugins, "USUAL_CUDA_INCLUDES", (str(thirteen),))
    assert plugins.cuda_headers() == []
    assert plugins.cuda_headers(thirteen) == [thirteen]
    with pytest.raises(plugins.PluginBuildError, match="has no cuda_runtime_api"):
        plugins.cuda_headers(tmp_path)


def test_what_lacks_of_cuda_is_said_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "USUAL_CUDA_INCLUDES", ())
    (tmp_path / "NvInfer.h").write_text("")
    (tmp_path / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 11\n")
    named = TrtOptions(tensorrt_include=(str(tmp_path),), cuda_include=tmp_path)
    with pytest.raises(plugins.PluginBuildError, match="has no cuda_runtime_api"):
        target_of("trt", named).ready(named, lambda *_: None)


VERSIONS = ("8.6.1", "10.3.0", "11.1.0")


def test_a_missing_plugin_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    fake_tensorrt.install(monkeypatch, "10.3.0")
    (package.path / "libstill_tensorrt10.so").unlink()
    with pytest.raises(BuildError, match=r"libstill_tensorrt10\.so is missing \(searched there only\).*--plugin"):
        build_engines(package)
    del package.manifest["plugins"]["10"]
    with pytest.raises(
        BuildError, match=r"no plugin library for TensorRT 10\.3\.0, only for 8, 11\. .*--tensorrt-include"
    ):
        build_engines(package)


def test_kernels_for_other_gpus_are_named_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch, archs=("sm_70", "sm_80"))
    module = fake_tensorrt.install(monkeypatch, "8.6.1")
    with pytest.raises(
        BuildError,
        match=r"kernels of .* for DenseMatMul are for sm_70, sm_80, this GPU is .*--arch sm_70,sm_80,sm_90\.",
    ):
        build_engines(package)
    named = tmp_path / "libstill_tensorrt8_static.so"
    named.write_text(fake_tensorrt.library_text(archs=("sm_90",)))
    other = tmp_path / "libz.so"
    other.write_text("ELF")
    with pytest.raises(BuildError, match=r"libz\.so is no plugin library of still-export\."):
        build_engines(package, BuildOptions(plugin=other))
    assert not module.networks and not module.loaded, "before TensorRT starts, and before a library is loaded"
    build_engines(package, BuildOptions(plugin=named))
    assert module.loaded == [named.name], "the archive that counts is that of the library"


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_gets_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch, workspace_mib=3, optimization_level=1)
    module = fake_tensorrt.install(monkeypatch, version)
    steps: list[str] = []
    build_engines(package, BuildOptions(batch=5, prefill_tokens=24), progress=steps.append)
    (config,) = module.configs
    typed = {"FP16", "OBEY_PRECISION_CONSTRAINTS", "REFIT"} if module.major == 8 else set()
    assert config.flags == {"TF32"} | typed
    assert config.pools == {"WORKSPACE": 3 << 20} and config.builder_optimization_level == 1
    assert config.sources == (0 if module.major == 8 else None)
    assert ("building the engine: tactics, 1 of 2" in steps) == (module.major >= 10)
    prefill, decode, rows = config.profiles
    assert prefill["input_ids"] == ((1, 1), (1, 24), (5, 24)) and prefill["past_length"] == ((1,), (1,), (5,))
    assert decode["input_ids"] == ((1, 1),) * 3, "kernels that are chosen for one row run one row alone"
    assert rows["input_ids"] == ((2, 1), (5, 1), (5, 1))
    most = SALIENT * (12 - 2)
    assert prefill["past_salient_key.0"] == ((1, 6, 1, 4), (1, 6, most, 4), (5, 6, most, 4))
    assert rows["past_salient_key.0"] == ((2, 6, 1, 4), (5, 6, most, 4), (5, 6, most, 4))
    (entry,) = open_package(package.path).manifest["engines"]
    assert entry["tensorrt"] == version and (entry["batch"], entry["prefill_tokens"]) == (5, 24)
    assert entry["profiles"] == ["prefill", "decode", "decode rows"]
    held = {
        layer.get_output(0).name: layer.precision for layer in module.networks[0].layers if hasattr(layer, "precision")
    }
    if module.major < 10:
        norm = [kind for name, kind in held.items() if ".square" in name or ".mean" in name or ".root" in name]
        assert len(norm) == 3 and set(norm) == {"float32"}, "norms stay in float32"
        assert held["q_flat"] is held["mixed"] is None, "plugins are as they are"
    else:
        assert not any(held.values()), "strongly typed networks take no types"


@pytest.mark.parametrize("version", VERSIONS)
def test_engines_for_later_versions_carry_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch, version_compatible=True)
    module = fake_tensorrt.install(monkeypatch, version)
    build_engines(package)
    assert "VERSION_COMPATIBLE" in module.configs[0].flags and "REFIT" not in module.configs[0].flags
    assert module.configs[0].plugins_to_serialize == [str(package.path / f"libstill_tensorrt{module.major}.so")]
    later = fake_tensorrt.install(monkeypatch, "11.4.0")
    TrtModel(package.path)
    assert not later.loaded, "the plan brings its plugin"
    fake_tensorrt.install(monkeypatch, "8.6.0")
    with pytest.raises(TrtError, match=f"built by TensorRT {version}, this is 8.6.0"):
        TrtModel(package.path)


def test_stripped_engines_get_their_weights_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch, strip_weights=True)
    module = fake_tensorrt.install(monkeypatch, "10.3.0")
    build_engines(package)
    assert {"STRIP_PLAN", "REFIT_IDENTICAL"} <= module.configs[0].flags
    TrtModel(package.path)
    assert module.engines[-1].refitted
    fake_tensorrt.install(monkeypatch, "8.6.1")
    with pytest.raises(BuildError, match=r"TensorRT 8\.6\.1 cannot strip weights; it came with 10\.0"):
        build_engines(package)


def test_float32_is_not_rounded_to_tensor_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch, "float32")
    module = fake_tensorrt.install(monkeypatch, "8.6.1")
    build_engines(package)
    assert module.configs[0].flags == {"REFIT"}


def test_timings_of_another_version_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    for version, kept in (("10.3.0", True), ("10.3.0", True), ("11.1.0", False)):
        module = fake_tensorrt.install(monkeypatch, version)
        steps: list[str] = []
        build_engines(package, progress=steps.append)
        assert (not any("starting a new one" in step for step in steps)) == kept
        assert module.configs[0].cache is not None
        assert (package.path / "timing.cache").read_text() == f"timings {version}"


def test_a_failed_build_leaves_the_old_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    module = fake_tensorrt.install(monkeypatch, "10.3.0")
    build_engines(package)
    module.build_fails = "Error Code 2: OutOfMemory (no further information)"
    with pytest.raises(
        BuildError, match=r"OutOfMemory.*\n.* MiB of device memory are free\. .*smaller --batch \(now 2\)"
    ):
        build_engines(open_package(package.path))
    assert "OutOfMemory" in (package.path / "build.log").read_text()
    module.build_fails = "10: Could not find any implementation for node {ForeignNode[a...b]}."
    with pytest.raises(
        BuildError,
        match=r"implementation for node.*\n.* another value of --optimization-level \(now 3\), .*--batch \(now 2\)\.",
    ) as refused:
        build_engines(open_package(package.path))
    assert "export again" not in str(refused.value)
    TrtModel(open_package(package.path).path)  # every hash right


def test_engines_for_one_row_have_no_profile_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch, batch=1)
    module = fake_tensorrt.install(monkeypatch, "8.6.1")
    build_engines(package)
    assert [p["input_ids"] for p in module.configs[0].profiles] == [((1, 1), (1, 2048), (1, 2048)), ((1, 1),) * 3]
    assert open_package(package.path).manifest["engines"][0]["profiles"] == ["prefill", "decode"]


def test_states_of_a_fixed_size_have_it_in_every_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    manifest = json.loads((package.path / "manifest.json").read_text())
    for state in manifest["states"]:
        if state["growth"]:
            state["growth"]["fixed"] = True
    write_manifest(package.path, {k: v for k, v in manifest.items() if k != "files"})
    trust_package(package.path)
    module = fake_tensorrt.install(monkeypatch, "8.6.1")
    build_engines(open_package(package.path))
    assert {p["past_salient_key.0"][0][2] for p in module.configs[0].profiles} == {SALIENT * (12 - 2)}


def test_packages_for_one_row_have_a_second_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch, batch=1)
    module = fake_tensorrt.install(monkeypatch, "8.6.1")
    module.build_fails = "10: Could not find any implementation for node {ForeignNode[a...b]}."
    with pytest.raises(BuildError, match=r"Or export again with --batch 2 or more: each part") as refused:
        build_engines(open_package(package.path))
    assert "--batch (now" not in str(refused.value), "more rows would not help"


def test_a_lost_or_truncated_engine_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    fake_tensorrt.install(monkeypatch, "10.3.0")
    build_engines(package)
    plan = package.path / "engine.plan"
    for damage in (lambda: plan.write_bytes(plan.read_bytes()[:-9]), plan.unlink):
        damage()
        with pytest.raises(PackageError, match=r"engine\.plan is .* or build it again: still-export build"):
            open_package(package.path)
        build_engines(reopen(package.path))
        TrtModel(open_package(package.path).path)


def test_a_build_vouches_only_for_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    fake_tensorrt.install(monkeypatch, "10.3.0")
    (package.path / "run_trt.py").write_text("damaged since")
    build_engines(package)
    with pytest.raises(PackageError, match=r"run_trt\.py is not the file that was exported"):
        open_package(package.path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    fake_tensorrt.install(monkeypatch, "10.3.0")

    def full(path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("still_export.engines.builder.write_atomically", full)
    with pytest.raises(BuildError, match=r"No space left on device\. Free space"):
        build_engines(package)


def test_every_still_node_must_be_a_plugin_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_layers(
        '{"Layers": [{"Name": "a", "PluginType": "X"}, {"Name": "a [profile 1]", "PluginType": "X"}, "names only"]}'
    ) == {"X": 1}
    package = trt_package(tmp_path / "trt", monkeypatch)
    fake_tensorrt.install(monkeypatch, "10.3.0")
    graph = onnx.load(package.model_path)
    fake_tensorrt.restore_bodies(graph)  # with functions, the parser takes them in the place of plugins
    onnx.save(graph, package.model_path)
    with pytest.raises(BuildError, match="4 nodes of DenseMatMul became 0 plugin layers"):
        build_engines(package)
    assert not (package.path / "engine.plan").exists()


def test_a_graph_without_creator_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    fake_tensorrt.install(monkeypatch, "10.3.0")
    graph = onnx.load(package.model_path)
    for node in graph.graph.node:
        drop_attribute(node, "plugin_version")
    onnx.save(graph, package.model_path)
    with pytest.raises(BuildError, match=r"refused .*model\.onnx:\n.*no creator for DenseMatMul"):
        build_engines(package)


def test_kernels_of_a_graph() -> None:
    model = small_graph("float16")
    run_passes(model, target_of("trt").passes)
    (node,) = (n for n in model.graph.node if n.op_type == "HybridAttention")
    drop_attribute(node, "chunk_size")
    node.attribute.append(onnx.helper.make_attribute("chunk_size", 64))
    (variant,) = kernel_variants(ir.from_proto(model))["HybridAttention"]
    assert (variant.dtype, variant.head_dim, variant.feature_rows, variant.chunk_size) == ("float16", 4, 5, 64)
    assert (variant.gate, variant.window_factor, variant.count_dtype, variant.select_scope) == (1, 0, "int32", "q_head")


def test_a_layer_without_kernel_is_refused_before_anything_is_compiled() -> None:
    model = small_graph("float16")
    run_passes(model, target_of("trt").passes)
    with pytest.raises(UnsupportedError, match=r"covers attention: chunk_size=8; the kernels have one of .* --to onnx"):
        kernel_variants(ir.from_proto(model))
    (node,) = (n for n in model.graph.node if n.op_type == "HybridAttention")
    drop_attribute(node, "chunk_size")
    node.attribute.append(onnx.helper.make_attribute("chunk_size", 64))
    kernel_variants(ir.from_proto(model))  # head size 4 is masked
    for info in (*model.graph.input, *model.graph.value_info):  # tensors of the layer are [..., 4]
        dims = info.type.tensor_type.shape.dim
        if dims and dims[-1].dim_value == 4:
            dims[-1].dim_value = 512
    with pytest.raises(UnsupportedError, match="head_dim=512; the kernels have"):
        kernel_variants(ir.from_proto(model))


def test_where_kernels_run() -> None:
    assert runs_on("sm_80", 86) and runs_on("sm_90", 90)
    assert not runs_on("sm_86", 80) and not runs_on("sm_80", 90) and not runs_on("sm_90", 100)


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "engine.plan"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, memoryview(b"new"))
    assert path.read_bytes() == b"new"
