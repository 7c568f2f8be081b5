"""An op of the tests' own goes the whole way with a registration each: trace, portable graph, ONNX Runtime, TensorRT-RTX, TensorRT."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from still_export.graph.options import ExportOptions
from still_export.mixers.registry import MIXERS
from still_export.models.load import load_model
from still_export.package.folder import Package
from still_export.package.trust import trust_package
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_export.targets.export import export
from still_export.targets.trt.options import RtxOptions, TrtOptions
from still_graphs.ops import OPS
from tests.still_export import fake_tensorrt
from tests.still_export.conftest import graph_alone  # noqa: F401  (its op is registered in this process alone)
from tests.still_export.packages import lower_package, portable_package
from tests.still_export.tiny import VOCAB, still_model
from tests.still_export.verbs import call
from tests.toy.mixer import DecayMixer
from tests.toy.spec import DECAY

LAYERS = ("hybrid_attention", "decay", "full_attention")
SIZES = ("--lengths", "1,17", "--decode-steps", "9")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registrations of an op."""
    monkeypatch.setitem(OPS, DECAY.name, DECAY)
    monkeypatch.setitem(MIXERS, DecayMixer.name, DecayMixer())


@pytest.fixture
def package(tmp_path: Path) -> Package:
    still_model("llama", torch.float32, layer_types=LAYERS).save_pretrained(tmp_path / "model")
    return export(ExportOptions(str(tmp_path / "model")), tmp_path / "package", command="still-export toy")


@pytest.fixture
def portable(package: Package, tmp_path: Path) -> Package:
    return portable_package(ExportOptions(str(tmp_path / "model")), tmp_path / "portable", "trt")


def test_the_package_is_proven_and_answers(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(package.manifest["ops"]) == {"HybridAttention", "Decay", "Attention"}
    (entry,) = (s for s in package.manifest["states"] if s["op"] == "Decay")
    assert entry == {
        "name": "total.1",
        "layer": 1,
        "op": "Decay",
        "shape": ["batch", 6, 10],
        "dtype": "float32",
        "in_place": False,
        "growth": None,
    }
    assert call("verify", package.path, *SIZES, "--quiet") == 0, capsys.readouterr().out
    model = OrtModel(package.path, threads=1)
    prompt = np.random.default_rng(3).integers(3, VOCAB, 37)
    model.start()
    answer = list(model.generate(prompt, 12, Sampling()))
    reference = load_model(package.manifest["config"]["model"])
    expected = reference.generate(torch.tensor(prompt)[None], max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert answer == expected.tolist()


@pytest.mark.slow
def test_a_wrong_state_of_the_op_is_named(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    """The proof knows the op's state by the manifest alone."""
    graph = onnx.load(package.path / "model.onnx", load_external_data=False)
    for function in graph.functions:
        if function.name == "Decay":
            for node in function.node:
                node.output[:] = ["wrong" if name == "present_total" else name for name in node.output]
            function.node.append(onnx.helper.make_node("Neg", ["wrong"], ["present_total"]))
    onnx.save(graph, package.path / "model.onnx")
    from still_export.package.folder import write_manifest

    write_manifest(package.path, {k: v for k, v in package.manifest.items() if k not in ("files", "versions")})
    assert call("verify", package.path, *SIZES, "--quiet") == 1
    assert "first diverging layer: 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs TensorRT-RTX")
def test_tensorrt_rtx_builds_it(portable: Package, tmp_path: Path) -> None:
    folder = tmp_path / "rtx"
    folder.mkdir()
    lower_package(portable, RtxOptions(prefill_tokens=32, archs=("sm_89",)), folder)
    assert call("build", folder, "--quiet") == 0
    assert (folder / "engine-rtx.plan").stat().st_size > 10_000


@pytest.mark.slow
def test_a_host_of_tensorrt_runs_it_as_a_plugin(
    portable: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_tensorrt.deploy(monkeypatch, "10.3.0")
    folder = tmp_path / "trt"
    folder.mkdir()
    lowered = lower_package(portable, TrtOptions(prefill_tokens=32, batch=3), folder)
    assert lowered.manifest["plugin_layers"] == {"HybridAttention": 1, "Decay": 1, "Attention": 1}
    trust_package(folder)
    assert call("build", folder, "--quiet") == 0
    assert call("verify", folder, *SIZES, "--quiet") == 0, capsys.readouterr().out
    assert call("run", folder, "--prompt-ids", "5,6,7", "--tokens", 3, "--quiet") == 0
