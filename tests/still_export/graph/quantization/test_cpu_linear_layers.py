"""Low-bit weights for ONNX Runtime on CPUs with our kernels: what is stored, what it computes, and how calls are split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
import torch

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization import read
from still_export.graph.quantization.forms import EXACT, Form, form_of
from still_export.graph.quantization.policy import ONNXRUNTIME, Layout, Quantization, rounds_activations
from still_export.graph.quantization.read import quantized_names, round_activations, with_package_weights
from still_export.graph.quantization.stored import StoredWeight
from still_export.loading.torch import TorchModel
from still_export.mixers.roles import EMBEDDING, HEAD
from still_export.models.read.source import find_source
from still_export.models.read.super_blocks import SuperBlocks
from still_export.models.read.weights import Deferred, value_of
from still_export.package.cache import CACHE_VARIABLE
from still_export.package.calls import next_feed
from still_export.package.folder import Package
from still_export.runtime.ort import OrtModel
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from still_export.targets.registry import target_of
from tests.still_export.conftest import Exporter
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.tiny import MIXED, VOCAB, plain_model
from tests.still_graphs.protos import attribute
from tests.still_kernels.matmul_nbits.super_block_cases import Case as KQuants

SIZES = dict(hidden_size=96, intermediate_size=160, num_attention_heads=8, head_dim=16, tie_word_embeddings=True)
TOKENS = np.random.default_rng(3).integers(0, VOCAB, (1, 70))
GUESSES = 7


@pytest.fixture
def built(kernels_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(kernels_cache))


@pytest.fixture
def package(built: None, export_tiny: Exporter) -> Package:
    options = {"quantize": "int4", "native": True, "speculate": GUESSES}
    return export_tiny("llama", options=options, sizes=SIZES, layer_types=MIXED)


@pytest.mark.slow
def test_linear_layers_are_ours_and_their_bodies_onnxruntimes(package: Package) -> None:
    assert package.manifest["prefill_tokens"] == 128
    graph = onnx.load(package.model_path, load_external_data=False)
    nodes = [n for n in graph.graph.node if n.op_type == "MatMulNBits"]
    assert {(n.domain, attribute(n, "block_size")) for n in nodes} == {("still", 32)}
    types = {i.name: i.data_type for i in graph.graph.initializer}
    assert {types[n.input[2]] for n in nodes} == {onnx.TensorProto.FLOAT16}
    bodies = [f for f in graph.functions if f.name == "MatMulNBits"]
    own = [n for f in bodies for n in f.node if n.op_type == "MatMulNBits"]
    assert {(n.domain, attribute(n, "accuracy_level")) for n in own} == {("com.microsoft", 4)}
    places = {i.name: {e.key: e.value for e in i.external_data} for i in graph.graph.initializer if i.external_data}
    (rows,) = [name for name in places if name.endswith(".rows")]
    assert places[rows]["offset"] == places[rows.removesuffix(".rows") + ".blocks"]["offset"], "it is stored once"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "bodies"])
def test_logits_are_those_of_the_held_weights(package: Package, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds_activations(package.manifest)
    if not kernels:
        monkeypatch.setattr("still_export.runtime.ort.native_library", lambda *a: None)
    runner = OrtModel(package.path)
    runner.start(1)
    actual = runner.feed(TOKENS[:, :20])
    held = with_package_weights(
        find_source(ExportOptions.from_manifest(package.manifest)), package.path, package.manifest
    )
    errors = []
    for rounded in (False, True):
        model = held.read().float()
        if rounded:
            round_activations(model, quantized_names(package.path), 32)
        reference = TorchModel(package.manifest, model)
        feed = {**next_feed({}, TOKENS[:, :20], None), **reference.empty_feed(1, 20)}
        errors.append(reference.infer(feed)["logits"][:, -1:])
    exact, rounded_run = errors
    assert np.abs(actual - exact).mean() < 2 * np.abs(rounded_run - exact).mean()


@pytest.mark.slow
def test_calls_of_guesses_give_what_plain_steps_give(package: Package) -> None:
    """Bit for bit, over ends of chunks."""
    found = []
    for split in ([1] * 40, [2] * 20, [5] * 8, [1 + GUESSES] * 5):
        runner = OrtModel(package.path)
        runner.start(1)
        runner.prefill(TOKENS[0, :30].tolist())
        rows, place = [], 30
        for count in split:
            part = TOKENS[:, place : place + count]
            rows.append(runner.guess(part) if count > 1 else runner.feed(part))
            if count > 1:
                runner.accept(np.array([count]))
            place += count
        found.append(np.concatenate(rows, 1))
    assert all(np.array_equal(other, found[0]) for other in found[1:])


K_QUANT_SIZES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32, vocab_size=136)


def k_quants(name: str, value: torch.Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType] | None:
    """A file's mixture: 6 bits for values, the feed-forward's last weight and the head, 4 for the others."""
    if value.dim() < 2:
        return None
    kind = "Q6_K" if "attn_v" in name or "ffn_down" in name or name.startswith("output.") else "Q4_K"
    return KQuants(kind, *value.shape).small_rows(), gguf.GGMLQuantizationType[kind]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_k_quants_of_a_file_are_kept_to_the_last_bit(
    built: None, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an embedding, llama's rotated rows and several weights in one node among them; read back from between tiles, too."""
    monkeypatch.setattr(read, "TOGETHER_READ", 11 * 256)
    plain = plain_model("llama", torch.float32, tie_word_embeddings=tied, **K_QUANT_SIZES)
    write_gguf(tmp_path / "m.gguf", plain, k_quants)
    request = ExportOptions(str(tmp_path / "m.gguf"), attach_untrained=True, quantize="int4")
    package = export(request, tmp_path / "package", options=OrtOptions(native=True))
    graph = onnx.load(package.model_path, load_external_data=False).graph
    forms = [(attribute(n, "bits"), attribute(n, "super_block")) for n in graph.node if n.op_type == "MatMulNBits"]
    layers = plain.config.num_hidden_layers
    kept = sorted(form for form in forms if form[1])  # gates are floats in the source
    end = 4 if tied else 6  # of the embedding, which is the head
    assert kept == sorted([(4, 256)] * (3 * layers) + [(6, 256)] * 2 * layers + [(end, 256)])
    assert [attribute(n, "bits") for n in graph.node if n.op_type == "GatherNBits"] == [4]
    roles = package.manifest["quantization"]["roles"]
    assert roles["embedding"] == [{"bits": 4, "method": EXACT, "weights": 1}]
    assert tied or roles["head"] == [{"bits": 6, "method": EXACT, "weights": 1}]
    source = find_source(ExportOptions.from_manifest(package.manifest))
    held = with_package_weights(source, package.path, package.manifest)
    ends = ("_proj.weight", "lm_head.weight", "embed_tokens.weight")
    projections = [name for name in source.weights if name.endswith(ends) and "g_proj" not in name]
    assert len(projections) == 7 * layers + (1 if tied else 2)
    for name in projections:
        assert torch.equal(value_of(held.weights[name]), value_of(source.weights[name])), name
    runner = OrtModel(package.path)
    runner.start(1)
    actual = runner.feed(TOKENS[:, :20] % 136)
    model = held.read().float()
    round_activations(model, quantized_names(package.path), 32)
    reference = TorchModel(package.manifest, model)
    feed = {**next_feed({}, TOKENS[:, :20] % 136, None), **reference.empty_feed(1, 20)}
    expected = reference.infer(feed)["logits"][:, -1:]
    assert np.abs(actual - expected).mean() < 0.02 * np.abs(expected).mean()


def test_k_quants_that_do_not_fit_kernels_are_rounded(built: None) -> None:
    layout = target_of("ort-cpu").layout_for("float32", OrtOptions())

    def bits(outputs: int, role: str, layout: Layout = layout) -> tuple[int, bool]:
        held = SuperBlocks(6, lambda: pytest.fail("read"))
        weight = Deferred(torch.Size((outputs, 256)), torch.float32, held.read, bits=6, super_blocks=held)  # type: ignore[arg-type]
        form = form_of(weight, role, Quantization("int4", layout=layout))
        assert form is not None
        return form.bits, form.super_blocks

    assert bits(16, HEAD) == (6, True)
    assert bits(16, EMBEDDING) == (6, True)
    assert bits(20, HEAD) == bits(20, EMBEDDING) == bits(16, HEAD, ONNXRUNTIME) == (8, False)


def test_layouts_follow_the_kernels(built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("ort-cpu")
    assert target.layout_for("float32", OrtOptions()).half_scales
    assert target.layout_for("float32", OrtOptions(native=False)) is ONNXRUNTIME
    assert target.layout_for("float16", OrtOptions()) is target.layout_for("float32") is ONNXRUNTIME
    with pytest.raises(ConfigError, match=r"--quantize-block 16: kernels for CPUs \(--native\) has 32, 64, 128, 256"):
        Quantization("int4", block_size=16, layout=target.layout_for("float32", OrtOptions()))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert target.layout_for("float32", OrtOptions()) is ONNXRUNTIME


def test_scales_that_half_precision_cannot_hold_are_refused(built: None) -> None:
    weight = torch.randn(4, 64) * 1e7
    asked = Quantization("int4", layout=target_of("ort-cpu").layout_for("float32", OrtOptions()))
    form = Form(4, "rtn", weight, zero_points=True, half_scales=True)
    stored = StoredWeight("w", weight, form, asked, "projection", {})
    with pytest.raises(UnsupportedError, match=r"w has weights up to \S+, whose scales half precision cannot hold"):
        _ = stored.made
    wide = StoredWeight("w", weight, replace(form, half_scales=False), asked, "projection", {})
    assert wide.made.scales.dtype == np.float32
