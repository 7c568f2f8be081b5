"""Keys and values that are kept in 8 bits, a scale a row."""

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
from still_export.targets.export import export, plan_job
from tests.still_export.conftest import Exporter
from tests.still_export.packages import with_library
from tests.still_export.targets.portable.test_cache_types import KEPT, feed
from tests.still_export.tiny import CHUNK, MIXED, VOCAB, still_model

WHOLE = (6 * CHUNK + 3,)
SPLITS = ((CHUNK - 1, 2, 4 * CHUNK, CHUNK + 2), (5 * CHUNK, *[1] * (CHUNK + 3)), (*[1] * CHUNK, 5 * CHUNK + 3))


@pytest.fixture
def package(export_tiny: Exporter) -> Package:
    return export_tiny("qwen2", options={"still": {"cache": "int8"}}, layer_types=MIXED)


def same(states: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """Codes are equal, other states close."""
    assert states.keys() == others.keys()
    for name, state in states.items():
        assert others[name].dtype == state.dtype
        if state.dtype == np.int32:
            np.testing.assert_array_equal(others[name].view(np.int8), state.view(np.int8), err_msg=name)
        else:
            np.testing.assert_allclose(others[name], state, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_states_are_codes_and_scales(package: Package) -> None:
    """The manifest and the graph agree; the linear state and scores stay float32."""
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


@pytest.mark.slow
def test_any_split_stores_the_same_bytes(package: Package) -> None:
    """Of bodies, whole, in pieces and by steps; PyTorch's too, and the rounding shows against a model without it."""
    logits, states = feed(package, WHOLE)
    assert any(state.view(np.int8).any() for name, state in states.items() if name.startswith("salient_key."))
    for split in SPLITS:
        other, theirs = feed(package, split)
        np.testing.assert_allclose(other, logits, atol=5e-6)
        same(states, theirs)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, sum(WHOLE)))
    reference = TorchModel(package.manifest, find_source(ExportOptions.from_manifest(package.manifest)).read())
    expected = reference.infer({**next_feed({}, tokens, None), **reference.empty_feed(2, sum(WHOLE))})
    np.testing.assert_allclose(logits, expected["logits"], atol=5e-5)
    plain = ExportOptions.from_manifest({"config": {**package.manifest["config"], "still": {}}})
    exact = TorchModel(package.manifest, find_source(plain).read())
    given = {**next_feed({}, tokens, None), **exact.empty_feed(2, sum(WHOLE))}
    assert np.abs(exact.infer(given)["logits"] - logits).max() > 1e-4


@pytest.mark.slow
def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cache int8 is for --to onnx and genai and trt, not for --to trt-rtx"):
        plan_job("trt-rtx", {"model": "m", "cache": "int8"})
    still_model("llama", torch.float32).save_pretrained(tmp_path / "model")
    options = ExportOptions(str(tmp_path / "model"), still={"cache": "int8"})
    with pytest.raises(ConfigError, match="head_dim=10: rows of 8 bits have multiples of 4"):
        export(options, tmp_path / "package")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "instructions", ["v3", *(pytest.param(name, marks=pytest.mark.long) for name in ("v4", "baseline"))]
)
def test_kernels_store_what_bodies_do(
    library: str, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instructions: str
) -> None:
    """The CPU's kernels in place, prompts, pieces and steps."""
    monkeypatch.setenv("STILL_CPU", instructions)
    model = with_library(package, library, tmp_path / "native")
    logits, states = feed(package, WHOLE)
    for split in (WHOLE, *SPLITS):
        ours, kept = feed(package, split, model)
        np.testing.assert_allclose(ours, logits, atol=5e-6)
        same(states, kept)


@pytest.mark.slow
@pytest.mark.long
def test_verify(package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(
            ["verify", str(package.path), "--lengths", "1,9,33", "--decode-steps", "20", "-o", str(tmp_path), "--quiet"]
        )
    assert "PASSED" in capsys.readouterr().out
