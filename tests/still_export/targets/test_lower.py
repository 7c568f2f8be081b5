"""The portable package is the hub: every target lowered from it is the one that is exported directly."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import still_export
from still_export.errors import ConfigError, PackageError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.package.calls import Arrays
from still_export.package.folder import Package
from still_export.proof.package import VerifyOptions, record, verify
from still_export.proof.recorded import RecordedCases
from still_export.runtime.ort import OrtModel
from still_export.targets.export import export
from still_export.targets.lower import lower
from still_export.targets.ort.options import OrtOptions
from still_export.targets.portable.narrow import demand_narrow
from still_export.targets.registry import TARGETS, target_of
from still_export.targets.trt.options import RtxOptions
from tests.still_export.conftest import Exporter
from tests.still_export.tiny import still_model

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "safetensors")))
from still_export.targets.trt import package
package._write_plugins = lambda *a, **k: {}
from still_export.targets.lower import lower
for to in sys.argv[3:]:
    lower(sys.argv[1], to, f"{sys.argv[2]}/{to}")
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


HOSTS = ("onnx", "genai", "web", "trt", "trt8", "trt-rtx")


@pytest.fixture(scope="module")
def all_lowered(portable: Package, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the packages that one process made, and what it said."""
    folder = tmp_path_factory.mktemp("lowered")
    command = [sys.executable, "-c", PROGRAM, str(portable.path), str(folder), *HOSTS]
    done = subprocess.run(command, capture_output=True, text=True)
    return folder, done.stderr[-800:]


@pytest.mark.slow
@pytest.mark.parametrize("to", HOSTS)
def test_lowered_is_exported_without_torch(
    portable: Package, all_lowered: tuple[Path, str], to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = all_lowered
    assert (folder / to).is_dir(), said
    monkeypatch.setattr("still_export.targets.trt.package._write_plugins", lambda *a, **k: {})
    options = ExportOptions.from_manifest(portable.manifest)
    direct = export(options, tmp_path / "direct", to=to)
    lowered, expected = contents(folder / to), contents(direct.path)
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
    quantization = {"scheme": "int4", "nodes": "com.microsoft"}
    manifest = {"model": {"dtype": "float16"}, "ops": {}, "quantization": quantization}
    stored = {"states": [], "capacity": {"capacity_tokens": 64, "bounded": False}}
    target_of("genai").check_model({**manifest, **stored, "still": {}}, OrtOptions())
    with pytest.raises(ConfigError, match=r"int4 weights as com\.microsoft, trt-rtx needs dequantized"):
        target_of("trt-rtx").check_model(manifest, RtxOptions())
    for kernels, to in (("plugin", "genai"), ("plugin", "web")):
        manifest = {"model": {"dtype": "float32"}, "ops": {}, "quantization": {**quantization, "nodes": kernels}}
        with pytest.raises(ConfigError, match="with --to onnx --no-native --quantize int4 and lower that"):
            target_of(to).check_model({**manifest, "still": {}}, OrtOptions())


@pytest.mark.slow
def test_every_step_is_dumped(portable: Package, tmp_path: Path) -> None:
    lower(portable.path, "onnx", tmp_path / "onnx", dump_dir=tmp_path / "steps")
    assert [p.name for p in sorted((tmp_path / "steps").iterdir())] == [
        "01_part_scales.onnx",
        "02_fuse_nodes.onnx",
        "03_strip_functions.onnx",
        "04_widen_activations.onnx",
        "05_attach_own_functions.onnx",
    ]


def meaning(path: Path) -> dict[str, str]:
    """Of each output of a graph what it is computed from, whatever values are called and in which order nodes stand."""
    model = onnx.load(path, load_external_data=False)
    bodies = {(f.domain, f.name, f.overload): f.SerializeToString(deterministic=True) for f in model.functions}

    def told(*parts: Any) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    known = {"": ""} | {v.name: told(v.name, v.type.tensor_type.elem_type) for v in model.graph.input}
    for tensor in model.graph.initializer:
        place = [(e.key, e.value) for e in tensor.external_data]
        known[tensor.name] = told(tensor.data_type, list(tensor.dims), tensor.raw_data, sorted(place))
    for node in model.graph.node:
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        body = bodies.get((node.domain, node.op_type, node.overload))
        given = told(node.op_type, node.domain, attributes, body, [known[name] for name in node.input])
        known |= {name: told(given, index) for index, name in enumerate(node.output)}
    return {v.name: told(known[v.name], v.type.tensor_type.elem_type) for v in model.graph.output}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, dtype",
    [
        ("llama", "float16"),
        pytest.param("qwen3", "float16", marks=pytest.mark.long),
        pytest.param("llama", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_narrowed_is_exported_in_that_type(export_tiny: Exporter, family: str, dtype: str, tmp_path: Path) -> None:
    """Weights byte for byte, graphs but for the names of their values, the manifest but for the command; and so every bit of an answer."""
    wide = export_tiny(family, dtype="float32", layer_types=("hybrid_attention", "full_attention", "hybrid_attention"))
    narrowed = lower(wide.path, "onnx", tmp_path / "narrowed", dtype=dtype, options=OrtOptions(native=False))
    options = replace(ExportOptions.from_manifest(wide.manifest), dtype=dtype)
    direct = export(options, tmp_path / "direct", options=OrtOptions(native=False))
    found, expected = contents(narrowed.path), contents(direct.path)
    graphs = {"portable.onnx", "model.onnx"}
    for manifest in (found["manifest.json"], expected["manifest.json"]):
        manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in graphs}
    assert found.keys() == expected.keys()
    assert [name for name in expected if name not in graphs and found[name] != expected[name]] == []
    for name in graphs:
        assert meaning(narrowed.path / name) == meaning(direct.path / name)
    assert meaning(narrowed.path / "model.onnx") != meaning(wide.path / "model.onnx")
    if dtype == "bfloat16":
        return  # ONNX Runtime's CPU provider has no kernels of it
    answers = []
    for package in (narrowed, direct):
        model = OrtModel(package.path, threads=1)
        model.start(2)
        answers.append([model.feed(np.random.default_rng(0).integers(3, 40, (2, n))) for n in (70, 1)])
    np.testing.assert_array_equal(np.concatenate(answers[0], 1), np.concatenate(answers[1], 1))


@pytest.mark.slow
def test_what_cannot_be_narrowed_is_named(
    export_tiny: Exporter, portable: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--dtype int8: a package is lowered to float16 or bfloat16"):
        lower(portable.path, "onnx", tmp_path / "x", dtype="int8")
    half = lower(portable.path, "onnx", tmp_path / "half", dtype="float16", options=OrtOptions(native=False))
    with pytest.raises(ConfigError, match="the package is in float16 already"):
        lower(half.path, "onnx", tmp_path / "x", dtype="float16")
    for change, said in (
        ({"quantization": {"scheme": "int4"}}, "bits of weights are chosen at export"),
        ({"config": {"still": {"cache": "int8"}}}, "stores keys and values in int8"),
    ):
        with pytest.raises(ConfigError, match=said):
            demand_narrow({**portable.manifest, **change}, "float16")
    monkeypatch.setattr("still_export.targets.portable.narrow.SAME_IN_ANY_TYPE", frozenset({"Gather"}))
    with pytest.raises(UnsupportedError, match=r"whether the model computes .* \(RMSNormalization\) in float32 beside"):
        lower(portable.path, "onnx", tmp_path / "x", dtype="float16")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_weight_that_float16_does_not_hold_is_named(tmp_path: Path) -> None:
    model = still_model("llama", torch.float32)
    with torch.no_grad():
        model.model.norm.weight[3] = 70000.0
    model.save_pretrained(tmp_path / "model")
    wide = export(ExportOptions(str(tmp_path / "model")), tmp_path / "wide", options=OrtOptions(native=False))
    with pytest.raises(ConfigError, match=r"has 7e\+04, too large for float16; bfloat16 has room"):
        lower(wide.path, "onnx", tmp_path / "x", dtype="float16")
    lower(wide.path, "onnx", tmp_path / "brain", dtype="bfloat16", options=OrtOptions(native=False))


def on_onnxruntime(package: Package, feed: Arrays) -> Arrays:
    """A call of a graph that no runtime here runs, whose bodies are standard ops: TensorRT-RTX's, with a row or more of each state."""
    session = onnxruntime.InferenceSession(package.model_path, providers=["CPUExecutionProvider"])
    types = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}
    given = {v.name: feed[v.name].astype(types[v.type]) for v in session.get_inputs()}
    for state in package.manifest["states"]:
        if growth := state["growth"]:
            name = f"past_{state['name']}"
            more = [(0, int(axis == growth["axis"])) for axis in range(given[name].ndim)]
            given[name] = np.pad(given[name], more)
    names = [v.name for v in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


@pytest.mark.slow
def test_one_file_of_answers_verifies_every_package(
    export_tiny: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch is asked once. ONNX Runtime and genai run their packages; those for TensorRT's kernels run by PyTorch's runner, of their
    states; TensorRT-RTX's graph runs by ONNX Runtime."""
    monkeypatch.setattr("still_export.targets.trt.package._write_plugins", lambda *a, **k: {})
    monkeypatch.setattr("still_export.targets.ort.kernels.compile_archive", lambda variants, archs, target: target)
    monkeypatch.setattr(
        "still_export.targets.ort.kernels.build_with_archive", lambda archive, target, include: target.write_text("")
    )
    portable = export_tiny(dtype="float32", chunk_size=32)
    answers, asked = tmp_path / "calls.npz", {"lengths": (1, 17, 40), "decode_steps": 6}
    assert record(portable.path, answers, VerifyOptions(**asked)) > 3
    held = []
    for target in TARGETS:
        options = target.options(archs=("sm_90",)) if target.name == "ort-cuda" else None
        package = lower(portable.path, target.name, tmp_path / target.name, options=options)
        if target.runtime is None:
            feed = RecordedCases(answers, package).draw([0])[0]
            found = on_onnxruntime(package, feed.feeds[0])
            for name, expected in feed.expected[0].items():
                part = found[name][tuple(map(slice, expected.shape))]
                np.testing.assert_allclose(part, expected, atol=2e-4, err_msg=f"{target.name}, {name}")
        else:
            there = target.host is None or importlib.util.find_spec(target.host) is not None
            runtime = "torch" if target.built else None if there else target.runtime
            monkeypatch.setattr("still_export.runtime.ort.native_library", lambda *a: None)
            found = verify(package.path, VerifyOptions(calls=answers, runtime=runtime, **asked))
            assert found.report.passed, target.name
        held.append(target.name)
    assert held == ["ort-cuda", "ort-cpu", "genai", "web", "trt8", "trt", "trt-rtx"]
    other = lower(portable.path, "onnx", tmp_path / "half", dtype="float16")
    with pytest.raises(PackageError, match="other weights"):
        verify(other.path, VerifyOptions(calls=answers, **asked))
