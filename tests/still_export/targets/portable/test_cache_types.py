"""Keys and values that are kept in another type than activations: float16, and 8 bits with a scale a row."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

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
from tests.still_export.verbs import call

pytestmark = pytest.mark.slow

KEPT = ("window_key", "window_value", "salient_key", "salient_value", "key", "value")
FAMILIES = {"float16": "llama", "int8": "qwen2"}
TOLERANCES = {"float16": 5e-5, "int8": 5e-6}
"""Of logits; 2e-4 in float16 where calls read what was not rounded."""
WHOLE = (6 * CHUNK + 3,)
SPLITS = ((CHUNK - 1, 2, 4 * CHUNK, CHUNK + 2), (5 * CHUNK, *[1] * (CHUNK + 3)), (*[1] * CHUNK, 5 * CHUNK + 3))
both = pytest.mark.parametrize("kind", FAMILIES)


def kept_in(kind: str, export_tiny: Exporter) -> Package:
    return export_tiny(FAMILIES[kind], options={"still": {"cache": kind}}, layer_types=MIXED)


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


def same(kind: str, states: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """Codes are equal, other states close."""
    assert states.keys() == others.keys()
    near = {"rtol": 1e-7, "atol": 5e-3} if kind == "float16" else {"rtol": 1e-4, "atol": 1e-5}
    for name, state in states.items():
        assert others[name].dtype == state.dtype
        if state.dtype == np.int32:
            np.testing.assert_array_equal(others[name].view(np.int8), state.view(np.int8), err_msg=name)
        else:
            np.testing.assert_allclose(others[name].astype("f4"), state.astype("f4"), **near, err_msg=name)


def test_states_are_kept_in_float16(export_tiny: Exporter) -> None:
    """The manifest, the graph's inputs and outputs, and what runs agree; the linear state and scores stay float32."""
    package = kept_in("float16", export_tiny)
    kinds = {s["name"].split(".")[0]: s["dtype"] for s in package.manifest["states"]}
    assert {name for name, kind in kinds.items() if kind == "float16"} == set(KEPT)
    assert kinds["kv_state"] == kinds["z_state"] == kinds["window_score"] == "float32"
    graph = onnx.load(package.model_path, load_external_data=False).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    assert types["past_salient_key.0"] == types["present_salient_key.0"] == onnx.TensorProto.FLOAT16
    assert types["past_key.1"] == onnx.TensorProto.FLOAT16 and types["present_kv_state.0"] == onnx.TensorProto.FLOAT


def test_states_are_codes_and_scales(export_tiny: Exporter) -> None:
    """The manifest and the graph agree; the linear state and scores stay float32."""
    package = kept_in("int8", export_tiny)
    states = {s["name"]: s for s in package.manifest["states"]}
    kinds = {name.split(".")[0]: s["dtype"] for name, s in states.items()}
    assert {name for name, kind in kinds.items() if kind == "int32"} == set(KEPT)
    assert {name for name in kinds if name.endswith("_scale")} == {f"{name}_scale" for name in KEPT}
    assert {kinds[name] for name in kinds if name not in KEPT} == {"float32"}
    assert states["salient_key.0"]["shape"] == ["batch", 6, "slots", 1]  # heads of 4 numbers: a word
    assert states["salient_key_scale.0"]["growth"] == states["salient_key.0"]["growth"]
    graph = onnx.load(package.model_path, load_external_data=False).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    assert types["past_key.1"] == types["present_key.1"] == onnx.TensorProto.INT32


@both
def test_any_split_stores_the_same(kind: str, export_tiny: Exporter) -> None:
    """Of bodies, whole, in pieces and by steps; PyTorch's too, and the rounding shows against a model without it."""
    package = kept_in(kind, export_tiny)
    logits, states = feed(package, WHOLE)
    assert any(state.view(np.int8).any() for name, state in states.items() if name.startswith("salient_key."))
    for split in SPLITS:
        other, theirs = feed(package, split)
        np.testing.assert_allclose(other, logits, atol=TOLERANCES[kind])
        same(kind, states, theirs)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, sum(WHOLE)))
    reference = TorchModel(package.manifest, find_source(ExportOptions.from_manifest(package.manifest)).read())
    expected = reference.infer({**next_feed({}, tokens, None), **reference.empty_feed(2, sum(WHOLE))})["logits"]
    np.testing.assert_allclose(logits, expected, atol={"float16": 2e-3, "int8": 5e-5}[kind])
    plain = ExportOptions.from_manifest({"config": {**package.manifest["config"], "still": {}}})
    exact = TorchModel(package.manifest, find_source(plain).read())
    given = {**next_feed({}, tokens, None), **exact.empty_feed(2, sum(WHOLE))}
    assert np.abs(exact.infer(given)["logits"] - logits).max() > 1e-4 > np.median(np.abs(expected - logits))


def test_refusals_of_float16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--cache float16 is for --to onnx and genai, not for --to trt; states"):
        plan_job("trt", {"model": "m", "cache": "float16"})
    with pytest.raises(ConfigError, match="is for ort-cpu: ort-cuda stores states in --dtype"):
        plan_job("onnx", {"model": "m", "native": True, "archs": ("sm_90",), "cache": "float16"})
    still_model("llama", torch.float32).save_pretrained(tmp_path / "model")
    options = ExportOptions(str(tmp_path / "model"), dtype="float16", still={"cache": "float16"})
    with pytest.raises(
        ConfigError, match="--cache float16 is for --dtype float32; keys and values of a float16 package"
    ):
        export(options, tmp_path / "package")
    assert call(tmp_path / "model", "--to", "onnx", "--cache", "int3", "-o", tmp_path / "package") == 2
    assert "cache='int3' is unknown; known: float16" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_refusals_of_codes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cache int8 is for --to onnx and genai and trt, not for --to trt-rtx"):
        plan_job("trt-rtx", {"model": "m", "cache": "int8"})
    still_model("llama", torch.float32).save_pretrained(tmp_path / "model")
    options = ExportOptions(str(tmp_path / "model"), still={"cache": "int8"})
    with pytest.raises(ConfigError, match="head_dim=10: rows of 8 bits have multiples of 4"):
        export(options, tmp_path / "package")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@both
@pytest.mark.long
def test_verify(kind: str, export_tiny: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = kept_in(kind, export_tiny)
    sizes = ["--lengths", "1,9,33", "--decode-steps", "20"]
    assert call("verify", package.path, *sizes, "-o", tmp_path, "--quiet") == 0
    assert "PASSED" in capsys.readouterr().out


@both
@pytest.mark.parametrize(
    "instructions", ["v3", *(pytest.param(name, marks=pytest.mark.long) for name in ("v4", "baseline"))]
)
def test_kernels_store_what_bodies_do(
    kind: str,
    library: str,
    export_tiny: Exporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instructions: str,
) -> None:
    """The CPU's kernels in place, prompts, pieces and steps."""
    monkeypatch.setenv("STILL_CPU", instructions)
    package = kept_in(kind, export_tiny)
    model = with_library(package, library, tmp_path / "native")
    logits, states = feed(package, WHOLE)
    for split in (WHOLE, *SPLITS):
        ours, kept = feed(package, split, model)
        np.testing.assert_allclose(ours, logits, atol=TOLERANCES[kind])
        same(kind, states, kept)
