"""LoRA adapters that are exchanged while a quantized package runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import still_export
from still_export.cli.main import main
from still_export.errors import CheckpointError, ConfigError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization import read
from still_export.graph.quantization.read import eight_bits, package_model, quantized_names, round_activations
from still_export.loading.torch import TorchModel
from still_export.models.read.adapters import adapter_inputs
from still_export.package.calls import next_feed
from still_export.package.folder import Package
from still_export.package.refusals import RunError
from still_export.targets.export import plan_job
from tests.still_export.conftest import Exporter
from tests.still_export.graph.quantization.test_quantization import SIZES
from tests.still_export.tiny import MIXED, VOCAB
from tests.still_export.verbs import call

QUERY, GATE, DOWN = (f"layers.{n}.weight" for n in ("0.self_attn.q_proj", "2.self_attn.g_proj", "1.mlp.down_proj"))
SHAPES = {QUERY: (96, 96), GATE: (96, 96), DOWN: (96, 128)}


def write_adapter(folder: Path, ranks: dict[str, int], alpha: float = 8.0, **more: Tensor) -> Path:
    """PEFT's folder with a pair for each of `ranks`."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(len(ranks))
    tensors = dict(more)
    for name, rank in ranks.items():
        outputs, inputs = SHAPES.get(name, (96, 96))
        module = f"base_model.model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.3
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    return folder


@pytest.fixture
def package(export_tiny: Exporter) -> Package:
    return export_tiny("llama", options={"quantize": "int4", "adapters": True}, sizes=SIZES, layer_types=MIXED)


def reference(package: Package, adapter: Path | None) -> Callable[[np.ndarray], tuple[np.ndarray, float]]:
    """PyTorch's logits over the package's weights: blocks with activations of 8 bits, beside them the adapter's products.

    Beside them how near any activation is to where another one of the 255 steps begins, as a share of a step.
    """
    margins: list[float] = []

    def rounded(x: Tensor, block_size: int) -> Tensor:
        steps = x.unflatten(-1, (-1, block_size))
        steps = steps / (steps.abs().amax(-1, keepdim=True) / 127)
        margins.append(float(((steps - steps.floor()) - 0.5).abs().min()))
        return eight_bits(x, block_size)

    model = package_model(ExportOptions.from_manifest(package.manifest), package.path, package.manifest)
    deltas: dict[str, Tensor] = {}
    if adapter is not None:
        from safetensors.torch import load_file

        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in SHAPES:
            module = f"base_model.model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in tensors:
                deltas[f"model.{name}"] = 2.0 * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "eight_bits", rounded)
        round_activations(
            model, {n: order for n, order in quantized_names(package.path).items() if n not in deltas}, 32
        )

    def forward(x: Tensor, linear: Any, delta: Tensor) -> Tensor:
        return F.linear(rounded(x, 32), linear.weight, linear.bias) + F.linear(x, delta)

    for name, delta in deltas.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        module.forward = partial(forward, linear=module, delta=delta)
    runner = TorchModel(package.manifest, model)

    def infer(tokens: np.ndarray) -> tuple[np.ndarray, float]:
        margins.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(read, "eight_bits", rounded)
            logits: np.ndarray = runner.infer({**next_feed({}, tokens, None), **runner.empty_feed(1, tokens.shape[1])})[
                "logits"
            ]
        return logits, min(margins)

    return infer


def expected(package: Package, adapters: Sequence[Path | None]) -> tuple[np.ndarray, dict[Path | None, np.ndarray]]:
    """Tokens, and PyTorch's logits with each adapter: tokens none of whose activations two orders of summing round to two values."""
    references = {adapter: reference(package, adapter) for adapter in adapters}
    for seed in range(200):
        tokens = np.random.default_rng(seed).integers(0, VOCAB, (1, 2))
        found = {adapter: infer(tokens) for adapter, infer in references.items()}
        if min(margin for _, margin in found.values()) > 1e-4:
            return tokens, {adapter: logits for adapter, (logits, _) in found.items()}
    raise AssertionError("every prompt has an activation between two steps")


@pytest.mark.slow
def test_adapters_are_exchanged_beside_the_same_weights(package: Package, tmp_path: Path) -> None:
    """Each equals PyTorch with its pairs; the session, and so the weights, stay; without one nothing is added."""
    first = write_adapter(tmp_path / "first", {QUERY: 4, GATE: 4, DOWN: 4})
    second = write_adapter(tmp_path / "second", {DOWN: 4})
    model = still_export.load(package.path, adapter=first)
    session = model.runner.session  # type: ignore[attr-defined]
    found: dict[Path | None, np.ndarray] = {}
    tokens, logits = expected(package, (first, second, None))
    for adapter in (first, second, None, first):
        model.use_adapter(adapter)
        actual = model.runner.feed(tokens)
        assert np.array_equal(found.setdefault(adapter, actual), actual), "an adapter left something behind"
        np.testing.assert_allclose(actual, logits[adapter], atol=2e-4, err_msg=str(adapter))
    assert model.runner.session is session  # type: ignore[attr-defined]
    assert (
        min(float(np.abs(found[a] - found[b]).max()) for a, b in ((first, second), (first, None), (second, None))) > 0.1
    )
    inputs = {i.name for i in onnx.load(package.model_path, load_external_data=False).graph.input}
    assert set(adapter_inputs(first, package.manifest)) < inputs


@pytest.mark.slow
def test_a_state_belongs_to_its_adapter(package: Package, tmp_path: Path) -> None:
    model = still_export.load(package.path)
    plain = model.read([3, 4, 5])
    model.use_adapter(write_adapter(tmp_path / "first", {QUERY: 4}))
    with pytest.raises(RunError, match="or another adapter"):
        model.restore(plain)
    adapted = model.read([3, 4, 5])
    model.use_adapter(None)
    model.restore(plain)
    with pytest.raises(RunError, match="or another adapter"):
        model.restore(adapted)


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused(package: Package, tmp_path: Path) -> None:
    def refused(kind: type[Exception], words: str, adapter: Path, where: Package = package) -> None:
        with pytest.raises(kind, match=words):
            adapter_inputs(adapter, where.manifest)

    good = write_adapter(tmp_path / "good", {QUERY: 4})
    quantization = {**package.manifest["quantization"], "adapters": []}
    plain = Package(package.path, {**package.manifest, "quantization": quantization})
    refused(ConfigError, "was exported without --adapters, so it takes none", good, plain)
    refused(ConfigError, r"has no adapter_config\.json", package.path)
    maps = write_adapter(tmp_path / "maps", {QUERY: 4}, **{"model.layers.0.self_attn.feature_k_weight": torch.ones(2)})
    refused(ConfigError, r"holds model\.layers\.0\.self_attn\.feature_k_weight, which is no LoRA", maps)
    other = write_adapter(tmp_path / "other", {"layers.7.self_attn.q_proj.weight": 4})
    refused(
        ConfigError, r"adapts model\.layers\.7\.self_attn\.q_proj\.weight, for which the package has no place", other
    )
    SHAPES["layers.1.self_attn.q_proj.weight"] = (96, 8)
    try:
        wide = write_adapter(tmp_path / "wide", {"layers.1.self_attn.q_proj.weight": 4})
    finally:
        del SHAPES["layers.1.self_attn.q_proj.weight"]
    refused(CheckpointError, r"gives \[96, 8\], the weight is \[96, 96\]", wide)
    with pytest.raises(RunError, match="exchanged by ONNX Runtime's runner alone"):
        still_export.load(package.path, runtime="torch", adapter=good)
    with pytest.raises(ConfigError, match="--adapters is for --to onnx, not for --to trt"):
        plan_job("trt", {"model": "nowhere", "quantize": "int4", "adapters": True})


@pytest.mark.slow
@pytest.mark.long
def test_run_and_verify_with_an_adapter(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(*words: object) -> Any:
        with pytest.raises(SystemExit, match="0"):
            main([str(w) for w in ("run", package.path, "--prompt-ids", "3,4,5", "--tokens", 12, "--json", *words)])
        return json.loads(capsys.readouterr().out)["tokens"]

    answers: Callable[..., Any] = tokens
    first = write_adapter(tmp_path / "first", {QUERY: 4, GATE: 4, DOWN: 4})
    assert answers() != answers("--adapter", first)
    assert call("run", package.path, "--prompt-ids", "3", "--adapter", tmp_path) == 2
    assert "has no weights" in capsys.readouterr().err
    arguments = [str(package.path), "--lengths", "1,9", "--decode-steps", "3", "-o", str(tmp_path / "proof"), "--quiet"]
    assert call("verify", *arguments, "--adapter", first) == 0
    said = capsys.readouterr().out
    assert "PASSED" in said and "polygraphy.sh" not in said
    inputs = adapter_inputs(first, package.manifest)
    monkeypatch.setattr("still_export.models.read.adapters.adapter_inputs", lambda *_: inputs)
    monkeypatch.setattr("still_export.models.read.adapters.read_pairs", lambda *_: {})  # PyTorch without it
    assert call("verify", *arguments, "--adapter", first) == 1
