"""Keys and values that are kept in float16 beside float32 activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from still_export.cli.main import main
from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions
from still_export.loading.torch import TorchModel
from still_export.models.read.source import find_source
from still_export.package.calls import next_feed
from still_export.package.folder import Package
from still_export.runtime.ort import OrtModel
from still_export.targets.export import export, plan_job
from tests.still_export.conftest import Exporter
from tests.still_export.packages import with_library
from tests.still_export.tiny import CHUNK, MIXED, VOCAB, still_model

KEPT = ("window_key", "window_value", "salient_key", "salient_value", "key", "value")


@pytest.fixture
def package(export_tiny: Exporter) -> Package:
    return export_tiny("llama", options={"still": {"cache": "float16"}}, layer_types=MIXED)


def feed(
    package: Package, sizes: tuple[int, ...], model: OrtModel | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits of the last of calls with so many tokens each, and the states after it."""
    runner = model or OrtModel(package.path)
    runner.start(2, sum(sizes))
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, sum(sizes)))
    start = 0
    for size in sizes:
        logits = runner.feed(tokens[:, start : start + size])
        start += size
    return logits, runner.state_arrays()


@pytest.mark.slow
def test_states_are_kept_in_float16(package: Package) -> None:
    """The manifest, the graph's inputs and outputs, and what runs agree; the linear state and scores stay float32."""
    kinds = {s["name"].split(".")[0]: s["dtype"] for s in package.manifest["states"]}
    assert {name for name, kind in kinds.items() if kind == "float16"} == set(KEPT)
    assert kinds["kv_state"] == kinds["z_state"] == kinds["window_score"] == "float32"
    graph = onnx.load(package.model_path, load_external_data=False).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    assert types["past_salient_key.0"] == types["present_salient_key.0"] == onnx.TensorProto.FLOAT16
    assert types["past_key.1"] == onnx.TensorProto.FLOAT16 and types["present_kv_state.0"] == onnx.TensorProto.FLOAT


@pytest.mark.slow
def test_calls_compute_with_what_later_calls_read(package: Package) -> None:
    """PyTorch and the bodies agree; any split of a sequence gives the same; the rounding shows against a model without it."""
    whole = (6 * CHUNK + 3,)
    logits, states = feed(package, whole)
    for split in ((CHUNK - 1, 2, 4 * CHUNK, CHUNK + 2), (*[1] * CHUNK, 5 * CHUNK + 3)):
        other, theirs = feed(package, split)
        np.testing.assert_allclose(other, logits, atol=5e-5)  # 2e-4 where calls read what was not rounded
        for name, state in states.items():
            np.testing.assert_allclose(theirs[name].astype("f4"), state.astype("f4"), atol=5e-3, err_msg=name)
    reference = TorchModel(package.manifest, find_source(ExportOptions.from_manifest(package.manifest)).read())
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, sum(whole)))
    given = {**next_feed({}, tokens, None), **reference.empty_feed(2, sum(whole))}
    expected = reference.infer(given)
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-3)
    plain = ExportOptions.from_manifest({"config": {**package.manifest["config"], "still": {}}})
    exact = TorchModel(package.manifest, find_source(plain).read()).infer(given)["logits"]
    assert np.abs(exact - logits).max() > 1e-4 > np.median(np.abs(expected["logits"] - logits))


@pytest.mark.slow
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--cache float16 is for --to onnx and genai, not for --to trt; states"):
        plan_job("trt", {"model": "m", "cache": "float16"})
    with pytest.raises(ConfigError, match="is for ort-cpu: ort-cuda keeps states as --dtype says"):
        plan_job("onnx", {"model": "m", "native": True, "archs": ("sm_90",), "cache": "float16"})
    still_model("llama", torch.float32).save_pretrained(tmp_path / "model")
    options = ExportOptions(str(tmp_path / "model"), dtype="float16", still={"cache": "float16"})
    with pytest.raises(
        ConfigError, match="--cache float16 is for --dtype float32; keys and values of a float16 package"
    ):
        export(options, tmp_path / "package")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "model"), "--to", "onnx", "--cache", "int3", "-o", str(tmp_path / "package")])
    assert "cache='int3' is unknown; known: float16" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
@pytest.mark.long
def test_verify(package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(
            ["verify", str(package.path), "--lengths", "1,9,33", "--decode-steps", "20", "-o", str(tmp_path), "--quiet"]
        )
    assert "PASSED" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "instructions", ["v3", *(pytest.param(name, marks=pytest.mark.long) for name in ("v4", "baseline"))]
)
def test_kernels_read_what_is_kept(
    library: str, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instructions: str
) -> None:
    """The kernels' outputs and states are those of the bodies, prompts, pieces and steps, in place."""
    monkeypatch.setenv("STILL_CPU", instructions)
    model = with_library(package, library, tmp_path / "native")
    for split in ((6 * CHUNK + 3,), (CHUNK - 1, 2, 4 * CHUNK, CHUNK + 2), (5 * CHUNK, *[1] * (2 * CHUNK + 3))):
        logits, states = feed(package, split)
        ours, kept = feed(package, split, model)
        np.testing.assert_allclose(ours, logits, atol=5e-5)
        for name, state in states.items():
            assert kept[name].dtype == state.dtype
            np.testing.assert_allclose(kept[name].astype("f4"), state.astype("f4"), atol=5e-3, err_msg=name)
