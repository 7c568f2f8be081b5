"""Low-bit weights: blocks, quantizers, policy, graph, package."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from still_export.cli.main import main
from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization import read
from still_export.graph.quantization.forms import plan_forms
from still_export.graph.quantization.policy import ONNXRUNTIME, POLICY, Quantization
from still_export.graph.quantization.quantizers import quantize
from still_export.graph.quantization.read import (
    eight_bits,
    package_source,
    quantized_names,
    round_activations,
    with_package_weights,
)
from still_export.loading.torch import TorchModel
from still_export.mixers import roles
from still_export.models.read.blocks import pack, unpack
from still_export.models.read.roles import weight_roles
from still_export.models.read.source import find_source
from still_export.models.read.weights import value_of
from still_export.package.calls import next_feed
from still_export.package.refusals import RunError
from still_export.runtime.ort import OrtModel
from still_export.targets.export import export
from tests.still_export.conftest import Exporter
from tests.still_export.tiny import DENSE, MIXED, VOCAB, still_model
from tests.still_export.verbs import call

SIZES = dict(hidden_size=96, intermediate_size=128, head_dim=16)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@given(st.sampled_from([4, 8]), st.integers(1, 9), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_packing_keeps_codes(bits: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, count), dtype=np.uint8)
    assert np.array_equal(unpack(pack(codes, bits), bits)[:, :count], codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_to_nearest_is_onnxruntimes(bits: int) -> None:
    """Bit for bit: random blocks, halves that lie between two codes, blocks of zeros or of one sign, an odd number of blocks."""
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(40, 96, generator=generator)
    halves = torch.randint(-15, 16, (40, 96), generator=generator) / 2
    between = torch.tensor([15.0, *[0.5 - 2.0**-25] * 31]).repeat(
        40, 3
    )  # scale 1: what raising by 0.5 would round to 1
    for weight in (drawn, drawn.abs(), -drawn.abs(), halves, drawn * (drawn > 1.5), between, drawn.bfloat16()):
        made = quantize(weight, bits, 32)
        config = DefaultWeightOnlyQuantConfig(block_size=32, bits=bits, is_symmetric=bits == 8)
        found = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.float().numpy().T))
        held = (made.packed, made.scales, made.zero_points)
        for ours, theirs in zip(held[: 2 if bits == 8 else 3], found, strict=False):
            assert ours is not None
            np.testing.assert_array_equal(ours.ravel(), theirs.ravel())


@pytest.mark.parametrize("family", DENSE)
def test_every_weight_has_a_role(family: str) -> None:
    model = still_model(family, torch.float32, layer_types=MIXED)
    found = weight_roles(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert set(found.values()) <= set(POLICY)
    assert found["model.layers.0.self_attn.g_proj.weight"] == roles.GATE
    assert found["model.layers.0.self_attn.feature_k_weight"] == roles.FEATURE_MAP
    assert found["model.layers.1.self_attn.o_proj.weight"] == roles.PROJECTION


def test_what_must_keep_eight_bits_does() -> None:
    for role in (roles.GATE, roles.FEATURE_MAP, roles.NORM, roles.EMBEDDING, roles.HEAD):
        assert (Quantization("int4").bits(role) or 32) >= 8, role


@pytest.fixture(params=[("int4", True), ("int8", False)], ids=str)
def quantized(request: Any, export_tiny: Exporter) -> Any:
    scheme, tied = request.param
    sizes = {**SIZES, "tie_word_embeddings": tied}
    return export_tiny("llama", options={"quantize": scheme}, sizes=sizes, layer_types=MIXED)


@pytest.mark.slow
def test_graph_and_manifest_say_the_policy(quantized: Any) -> None:
    graph = onnx.load(quantized.model_path, load_external_data=False).graph
    said = quantized.manifest["quantization"]
    low = {"int4": 4, "int8": 8}[said["scheme"]]
    tied = "lm_head.weight.blocks" not in {i.name for i in graph.initializer}
    bits = Counter(
        next(a.i for a in node.attribute if a.name == "bits") for node in graph.node if node.op_type == "MatMulNBits"
    )
    # Query, key and value are one product, and so are the two that open the feed-forward; a gate of as many bits joins the first.
    products, gates = 3 * 4, 2 if low == 4 else 0
    expected = Counter({low: products})
    expected[8] += gates + 1
    assert bits == expected
    assert said["roles"]["gate"] == [{"bits": 8, "method": "rtn", "weights": 2}]
    assert said["roles"]["projection"] == [{"bits": low, "method": "rtn", "weights": 12}]
    assert [form["bits"] for form in said["roles"]["norm"]] == [None]
    places = {
        i.name: {e.key: e.value for e in i.external_data} for i in graph.initializer if i.name.startswith("model.embed")
    }
    rows = places["model.embed_tokens.weight.rows"]
    assert int(rows["length"]) == VOCAB * 96
    if tied:  # stored once
        assert places["model.embed_tokens.weight.blocks"] == rows
        assert not [i for i in graph.initializer if i.name.startswith("lm_head")]
    else:
        assert "model.embed_tokens.weight.blocks" not in places
    used = {name for node in graph.node for name in node.input}
    assert {i.name for i in graph.initializer} <= used


@pytest.mark.slow
def test_package_computes_with_the_weights_that_it_holds(quantized: Any) -> None:
    """Close to PyTorch over the dequantized weights, equal where PyTorch rounds activations too, and not to the original. Few tokens, and
    several draws: on some processors an activation that nearly ties rounds the other way, which multiplies in a random model."""
    source = find_source(ExportOptions.from_manifest(quantized.manifest))
    held = with_package_weights(source, quantized.path, quantized.manifest)
    rounded = held.read()
    round_activations(rounded, quantized_names(quantized.path), 32)
    models = {"original": source.read(), "held": held.read(), "rounded": rounded}
    references = {name: TorchModel(quantized.manifest, model) for name, model in models.items()}
    runner = OrtModel(quantized.path)
    found: dict[str, list[float]] = {name: [] for name in models}
    for seed in range(5):
        runner.start(1)
        tokens = np.random.default_rng(seed).integers(0, VOCAB, (1, 3))
        actual = runner.feed(tokens)
        for name, reference in references.items():
            feed = {**next_feed({}, tokens, None), **reference.empty_feed(1, 3)}
            found[name].append(float(np.abs(reference.infer(feed)["logits"] - actual).mean()))
    errors = {name: float(np.median(each)) for name, each in found.items()}
    assert errors["rounded"] < 1e-5 < errors["held"]
    if quantized.manifest["quantization"]["scheme"] == "int4":
        assert errors["held"] < 0.5 * errors["original"]


@pytest.mark.slow
def test_another_device_reads_the_same_weights(quantized: Any) -> None:
    """Bit for bit; "cpu:0" is one, as far as the reader knows."""
    source = find_source(ExportOptions.from_manifest(quantized.manifest))
    here, there = (
        with_package_weights(source, quantized.path, quantized.manifest, d).weights for d in ("cpu", "cpu:0")
    )
    for name, weight in here.items():
        assert torch.equal(value_of(weight), value_of(there[name])), name


@pytest.mark.slow
def test_a_product_with_a_zero_point_is_rounded_as_by_the_cuda_provider(quantized: Any) -> None:
    """All numbers of a block are off by as much, half a unit of float16 of a scale times its zero point; without zero points by nothing."""
    options = ExportOptions.from_manifest(quantized.manifest)
    plain, rounded = (
        package_source(options, quantized.path, quantized.manifest, rounded=kind).weights
        for kind in (None, torch.float16)
    )
    most = 0.0
    for name in plain:
        if value_of(plain[name]).dim() == 2:
            here, there = (value_of(side[name]).float().unflatten(1, (-1, 32)) for side in (plain, rounded))
            off = there - here
            assert torch.allclose(off, off[..., :1].expand_as(off), rtol=0, atol=2.0**-20 * float(here.abs().max())), (
                name
            )
            assert (off.abs() <= 2.0**-11 * 2 * here.abs().amax(-1, keepdim=True) + 1e-9).all(), name
            most = max(most, float(off.abs().max() / here.abs().max()))
    assert (most > 2.0**-14) == (quantized.manifest["quantization"]["scheme"] == "int4")


def test_threads_are_as_many_behind_rounding() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        weight = torch.from_numpy(normal(2048, 1024))  # of several slabs
        together = quantize(weight, 4, 32)
        parts = [quantize(part, 4, 32) for part in weight.split(256)]
        assert torch.get_num_threads() == 3
        assert np.array_equal(together.packed, np.concatenate([part.packed for part in parts]))
    finally:
        torch.set_num_threads(before)


def test_rounded_activations_are_a_grid() -> None:
    x = torch.from_numpy(normal(5, 64))
    y = eight_bits(x, 32)
    step = x.reshape(5, 2, 32).abs().amax(-1) / 127
    assert bool(((y - x).abs().reshape(5, 2, 32) <= step[..., None] / 2 + 1e-6).all()) and not torch.equal(x, y)
    assert torch.equal(eight_bits(torch.zeros(2, 32), 32), torch.zeros(2, 32))


@pytest.mark.slow
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--quantize int3 is unknown; known: int8, int4"):
        ExportOptions("m", quantize="int3").quantization(ONNXRUNTIME, "onnx")
    with pytest.raises(ConfigError, match="Did you mean 'gptq'"):
        ExportOptions("m", quantize="int4", quantize_method="gpt").quantization(ONNXRUNTIME, "onnx")
    with pytest.raises(ConfigError, match="MatMulNBits has 16, 32"):
        ExportOptions("m", quantize="int4", quantize_block=48).quantization(ONNXRUNTIME, "onnx")
    with pytest.raises(ConfigError, match="--adapters are for --quantize"):
        ExportOptions("m", quantize_method="rtn")
    still_model("llama", torch.float32).save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"has 24 inputs, which blocks of 32 do not divide"):
        export(ExportOptions(str(tmp_path / "model"), quantize="int4"), tmp_path / "package")
    assert call(tmp_path / "model", "--to", "trt", "--quantize", "int3", "-o", tmp_path / "package") == 2
    assert "--quantize int3 is unknown" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_verify_tells_faults_from_the_price(
    quantized: Any, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights that the package holds are the reference; what they cost is said beside. A product that differs from them fails."""
    arguments = ["verify", str(quantized.path), "--lengths", "1,9", "--decode-steps", "3", "-o", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    said = capsys.readouterr().out
    assert "activations rounded to 8 bits" in said and "quantization loss on 64 random tokens: KL" in said
    loss = json.loads((tmp_path / "report.json").read_text())["quantization_loss"]
    assert 0 < loss["kl"] <= loss["kl_rounded"] * 1.5 and loss["bits_per_byte"] is None

    def wrong(parts: Any, *rest: Any) -> Any:
        found = held_weights(parts, *rest)
        name = "model.layers.0.mlp.up_proj.weight"
        return {**found, name: lambda rows: found[name](rows) * 1.2}

    held_weights = read.row_readers
    monkeypatch.setattr(read, "row_readers", wrong)
    with pytest.raises(SystemExit, match="1"):
        main(arguments)


@pytest.mark.slow
def test_manifest_and_graph_agree(quantized: Any, tmp_path: Path) -> None:
    shutil.copytree(quantized.path, tmp_path / "package")
    manifest = json.loads((tmp_path / "package/manifest.json").read_text())
    manifest["quantization"]["roles"]["gate"][0]["bits"] = 4
    (tmp_path / "package/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"manifest\.json: quantization\.roles is .* in model\.onnx it is"):
        OrtModel(tmp_path / "package")


def test_weights_of_low_rank_stay_where_no_block_divides_them(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"wide.weight": torch.zeros(8, 64), **{f"{n}.weight": torch.zeros(256, n) for n in (4, 32, 48)}}
    _, forms = plan_forms(weights, dict.fromkeys(weights, roles.PROJECTION), Quantization("int8"))
    assert set(forms) == {"wide.weight", "32.weight"}
    assert "2 weights of low rank" in caplog.text and "4.weight, 48.weight" in caplog.text
    for shape in ((64, 48), (1024, 144)):
        with pytest.raises(UnsupportedError, match="do not divide"):
            plan_forms({"a.weight": torch.zeros(shape)}, {"a.weight": roles.PROJECTION}, Quantization("int8"))
