"""Blocks of GGUF files are taken over as they are, and LoRA pairs stay apart from quantized weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from still_export.errors import CheckpointError
from still_export.gguf.edits import AS_IT_IS, Edit, unpaired
from still_export.gguf.types import BLOCKS
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.forms import EXACT, form_of, plan_forms
from still_export.graph.quantization.policy import Quantization
from still_export.graph.quantization.quantizers import quantize
from still_export.graph.quantization.read import package_model, with_package_weights
from still_export.loading.torch import TorchModel
from still_export.mixers.roles import EMBEDDING, FEED_FORWARD, PROJECTION
from still_export.models.gguf.tensors import Stored
from still_export.models.gguf.tensors import weight as of_file
from still_export.models.load import open_source
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.source import find_source
from still_export.models.read.weights import Deferred, SourceBlocks, Weight, value_of
from still_export.package.calls import next_feed
from still_export.runtime.ort import OrtModel
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from still_export.targets.trt.options import TrtOptions
from tests.still_export.graph.quantization.test_quantization import SIZES
from tests.still_export.linear_models import linear_model
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.packages import lower_package, portable_package
from tests.still_export.tiny import MIXED, VOCAB, random_ids, still_model

pytestmark = pytest.mark.slow  # each exports a model


def stored(kind: str, rows: int, columns: int, seed: int) -> Any:
    """A tensor as the reader has it, with random bytes as codes and random numbers as scales."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    fields = 2 if BLOCKS[kind][1] else 1
    numbers = random.standard_normal((*data.shape[:2], fields)).astype("<f2")
    data[..., : 2 * fields] = numbers.view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(100, 150, data.shape[:2])
    tensor_type = gguf.GGMLQuantizationType[kind]
    return SimpleNamespace(
        name="w", tensor_type=tensor_type, data=data.reshape(rows, -1), shape=np.array([columns, rows])
    )


def read_blocks(tensor: Any, name: str, edit: Edit = AS_IT_IS) -> BlockWeight:
    """The blocks of a weight of `stored`."""
    blocks = of_file(name, [Stored(tensor, "a.gguf")], torch.float32, edit).blocks
    assert blocks is not None
    return blocks.read()


@given(st.sampled_from(sorted(BLOCKS)), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_blocks_are_what_gguf_says(kind: str, heads: int, blocks: int, seed: int) -> None:
    tensor = stored(kind, 4 * heads, 256 * blocks, seed)
    expected = dequantize(tensor.data, tensor.tensor_type)
    found = read_blocks(tensor, "w")
    bits, offsets, half_scales = BLOCKS[kind]
    assert found.bits == bits and (found.offsets is not None) == offsets
    assert not half_scales or np.array_equal(found.scales, found.scales.astype(np.float16))
    if offsets:  # the offset is moved by 8 scales: one rounding of float32
        largest = np.abs(expected).max() + 16 * np.abs(found.scales).max()
        assert np.abs(found.dequantized() - expected).max() <= 4e-7 * largest
    else:
        assert np.array_equal(found.dequantized(), expected)
    order = unpaired(4 * heads, heads)
    assert np.array_equal(read_blocks(tensor, "w", Edit(order)).dequantized(), found.dequantized()[order])
    columns = np.arange(256 * blocks).reshape(-1, 32)[::-1].ravel()
    turned = read_blocks(tensor, "w", Edit(columns=columns)).dequantized()
    assert np.array_equal(turned, found.dequantized()[:, columns])
    torn_apart = columns[::-1].copy()
    torn = of_file("w", [Stored(tensor, "a.gguf")], torch.float32, Edit(columns=torn_apart))
    assert torn.blocks is None and np.array_equal(torn.read().numpy(), expected[:, torn_apart])


def test_an_order_that_moves_nothing_keeps_k_quants() -> None:
    """Qwen3.5 with as many value heads as key heads: its output projection stays as the file has it."""
    tensor = stored("Q4_K", 8, 512, 0)
    same, turned = np.arange(512), np.arange(512).reshape(2, 256)[::-1].ravel()
    kept = [of_file("w", [Stored(tensor, "a.gguf")], torch.float32, Edit(columns=c)) for c in (same, turned)]
    assert [weight.super_blocks is not None for weight in kept] == [True, False]


def test_a_damaged_scale_is_named() -> None:
    tensor = stored("Q4_0", 4, 256, 0)
    tensor.data.reshape(4, 8, 18)[2, 3, :2] = np.array([np.nan], "<f2").view(np.uint8)
    with pytest.raises(CheckpointError, match=r"w in a\.gguf has a scale that is no number"):
        read_blocks(tensor, "w")


@pytest.mark.parametrize("fours", [0, 1, 3])
def test_weights_of_more_bits_in_a_file_of_few_are_kept(fours: int) -> None:
    """Q8_0 beside Q4_K was chosen by the file's maker; a file of Q8_0 is rounded where 4 bits are asked for."""

    def weight(bits: int, blocks: bool = True) -> Deferred:
        source = SourceBlocks(bits, False, True, lambda: pytest.fail("read")) if blocks else None
        return Deferred(torch.Size((64, 64)), torch.float32, lambda: pytest.fail("read"), source, bits)

    weights: dict[str, Weight] = {"eight": weight(8), "torn": weight(8, blocks=False), "float": torch.zeros(64, 64)}
    weights |= {f"four {number}": weight(4) for number in range(fours)}
    _, forms = plan_forms(weights, dict.fromkeys(weights, PROJECTION), Quantization("int4"))
    found = {name: (form.bits, form.method) for name, form in forms.items()}
    kept = {"eight": (8, EXACT), "torn": (8, "rtn")} if fours else dict.fromkeys(("eight", "torn"), (4, "rtn"))
    four = {f"four {number}": (4, EXACT) for number in range(fours)}
    assert found == {**kept, "float": (4, "rtn"), **four}


def test_forms_of_a_gguf_file() -> None:
    """Its blocks where the policy gives as many bits; rows have no form of 4 bits; what its maker gave 6 bits gets 8."""

    def weight(bits: int, blocks: bool = True, offsets: bool = False) -> Deferred:
        source = SourceBlocks(bits, offsets, True, lambda: pytest.fail("read")) if blocks else None
        return Deferred(torch.Size((64, 64)), torch.float32, lambda: pytest.fail("read"), source, bits)

    def said(given: Deferred, role: str, *asked: Any) -> tuple[int, str]:
        form = form_of(given, role, Quantization(*asked))
        assert form is not None
        return form.bits, form.method

    assert said(weight(4, offsets=True), PROJECTION, "int4") == (4, EXACT)
    assert said(weight(4), PROJECTION, "int8") == (4, EXACT)
    assert said(weight(8), PROJECTION, "int8") == (8, EXACT)
    assert said(weight(8), PROJECTION, "int4") == (4, "rtn")
    assert said(weight(8), EMBEDDING, "int4") == (8, EXACT)
    assert said(weight(4), EMBEDDING, "int4") == (8, "rtn")
    assert said(weight(8, offsets=True), EMBEDDING, "int8") == (8, "rtn")
    assert said(weight(6, blocks=False), PROJECTION, "int4") == (8, "rtn")
    assert said(weight(4), PROJECTION, "int4", "rtn", 64) == (4, "rtn")


def test_both_matrices_of_experts_have_the_bits_of_the_wider_one() -> None:
    """Files of Q4_K_M have some of them in 6 bits; layers of which both have 4 keep them."""

    def stack(bits: int) -> Deferred:
        source = SourceBlocks(4, False, True, lambda: pytest.fail("read"), zero_points=True) if bits == 4 else None
        return Deferred(torch.Size((3, 64, 64)), torch.float32, lambda: pytest.fail("read"), source, bits)

    bits = {"0.gate_up": 4, "0.down": 6, "1.gate_up": 4, "1.down": 4}
    weights = {f"layers.{name}": stack(number) for name, number in bits.items()}
    _, forms = plan_forms(weights, dict.fromkeys(weights, FEED_FORWARD), Quantization("int4"))
    assert [form.bits for form in forms.values()] == [8, 8, 4, 4]
    assert not forms["layers.0.gate_up"].zero_points and forms["layers.1.down"].zero_points


@pytest.fixture
def adapted(tmp_path: Path) -> ExportOptions:
    """A model and an adapter of rank 4 for two projections."""
    still_model("llama", torch.float32, sizes=SIZES, layer_types=MIXED).save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    pairs = {}
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"):
        inputs = 128 if "down" in name else 96
        pairs[f"model.{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.3
        pairs[f"model.{name}.lora_B.weight"] = torch.randn(96, 4, generator=generator) * 0.3
    (tmp_path / "adapter").mkdir()
    save_file(pairs, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8.0}))
    return ExportOptions(str(tmp_path / "model"), overlays=(str(tmp_path / "adapter"),), quantize="int4")


def test_pairs_stay_apart(adapted: ExportOptions, tmp_path: Path) -> None:
    """The base is rounded without them; the package adds their thin products."""
    package = export(adapted, tmp_path / "package")
    graph = onnx.load(package.model_path, load_external_data=False).graph
    names = {i.name for i in graph.initializer}
    assert (
        any(n.startswith("model.layers.0.self_attn.q_proj.weight") and n.endswith(".inner") for n in names)
        and package.manifest["quantization"]["lora"] == "apart"
    )
    thin = {o for n in graph.node for o in n.output if o.endswith((".inner", ".outer", ".sum"))}
    assert thin and thin <= {info.name for info in graph.value_info}, "passes ask for types"
    source = find_source(adapted)
    held = with_package_weights(source, package.path, package.manifest)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        weight = source.weights[name]
        assert isinstance(weight, Deferred) and weight.adapted is not None and weight.adapted.base is not None
        (pair,) = weight.adapted.pairs
        base = quantize(value_of(weight.adapted.base), 4, 32).dequantized()
        delta = pair.scale * value_of(pair.b) @ value_of(pair.a)
        torch.testing.assert_close(value_of(held.weights[name]), torch.from_numpy(base) + delta)
    errors = {}
    tokens = np.random.default_rng(3).integers(0, VOCAB, (1, 3))
    runner = OrtModel(package.path)
    runner.start(1)
    actual = runner.feed(tokens)
    for name, model in {
        "held": package_model(adapted, package.path, package.manifest),
        "original": source.read(),
    }.items():
        reference = TorchModel(package.manifest, model)
        feed = {**next_feed({}, tokens, None), **reference.empty_feed(1, 3)}
        errors[name] = float(np.abs(reference.infer(feed)["logits"] - actual).mean())
    assert errors["held"] < 0.4 * errors["original"]


def test_merged_pairs_are_rounded_with_the_weight(adapted: ExportOptions, tmp_path: Path) -> None:
    from dataclasses import replace

    package = export(replace(adapted, lora="merged"), tmp_path / "package")
    graph = onnx.load(package.model_path, load_external_data=False).graph
    assert not [i.name for i in graph.initializer if i.name.endswith((".inner", ".outer"))]
    source = find_source(adapted)
    name = "model.layers.0.self_attn.q_proj.weight"
    held = with_package_weights(source, package.path, package.manifest).weights[name]
    expected = quantize(value_of(source.weights[name]), 4, 32).dequantized()
    assert np.array_equal(value_of(held).numpy(), expected)


def test_thin_products_of_one_value_keep_their_names_for_tensorrt(
    adapted: ExportOptions, tmp_path: Path, monkeypatch: Any
) -> None:
    """Query and gate read one value by products of different bits, each with a pair; what is merged could not be read back."""
    from dataclasses import replace

    folder = Path(adapted.overlays[0])
    pairs = load_file(folder / "adapter_model.safetensors")
    gate = find_source(adapted).weights["model.layers.0.self_attn.g_proj.weight"]
    for part, shape in (("A", (4, gate.shape[1])), ("B", (gate.shape[0], 4))):
        pairs[f"model.layers.0.self_attn.g_proj.lora_{part}.weight"] = torch.ones(shape)
    save_file(pairs, folder / "adapter_model.safetensors")
    options = replace(adapted, dtype="float16")
    portable = portable_package(options, tmp_path / "portable", "trt8")
    monkeypatch.setattr("still_export.targets.trt.package._write_plugins", lambda *a: {})
    (tmp_path / "lowered").mkdir()
    package = lower_package(portable, TrtOptions(batch=2, prefill_tokens=32), tmp_path / "lowered", "trt8")
    names = {i.name for i in onnx.load(package.model_path, load_external_data=False).graph.initializer}
    inner = [n for n in names if n.endswith(".inner") and "layers.0.self_attn" in n]
    assert len(inner) == 2, names
    held = with_package_weights(find_source(options), package.path, package.manifest)
    for name in held.weights:
        assert value_of(held.weights[name]).shape == find_source(options).weights[name].shape


@pytest.fixture
def model_of_blocks(tmp_path: Path, monkeypatch: Any) -> Path:
    """A model whose output projections and feed-forward layers are blocks of a file, with offsets."""
    from still_export.models import load

    still_model(
        "llama", torch.float32, sizes={**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    ).save_pretrained(tmp_path / "model")
    original = load.open_tensors

    def with_blocks(files: Any, dtype: Any = None, quantized: Any = None) -> Any:
        found = original(files, dtype)
        for seed, (name, weight) in enumerate(found.items()):
            if "lora" not in name and (".mlp." in name or "o_proj" in name):
                tensor = stored("Q4_1", *weight.shape, seed)
                tensor.data.reshape(weight.shape[0], -1, 20)[..., :4] = np.array([0.02, -0.15], "<f2").view(np.uint8)
                blocks = read_blocks(tensor, name)
                values = torch.from_numpy(blocks.dequantized()).to(weight.dtype)
                source = SourceBlocks(4, True, True, lambda blocks=blocks: blocks)
                found[name] = Deferred(weight.shape, weight.dtype, lambda values=values: values, source, 4)
        return found

    monkeypatch.setattr(load, "open_tensors", with_blocks)
    return tmp_path / "model"


@pytest.mark.slow
def test_our_product_takes_offsets(model_of_blocks: Path, tmp_path: Path) -> None:
    """Without thin products; its bodies equal PyTorch over what is read back."""
    options = ExportOptions(str(model_of_blocks), dtype="float16", quantize="int4")
    package = portable_package(options, tmp_path / "package", "trt8")
    graph = onnx.load(package.model_path, load_external_data=False).graph
    nodes = [n for n in graph.node if n.op_type == "MatMulNBits"]
    assert sum(len(n.input) == 5 and n.input[4].endswith(".offsets") and not n.input[3] for n in nodes) == 3 * 3
    assert not [i.name for i in graph.initializer if i.name.endswith((".inner", ".outer")) or "block_sums" in i.name]
    source = find_source(options)
    held = with_package_weights(source, package.path, package.manifest)
    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(value_of(held.weights[name]), value_of(source.weights[name]), rtol=2e-3, atol=1e-4)
    reference, runner = TorchModel(package.manifest, held.read().float()), OrtModel(package.path)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (1, 3))
    runner.start(1)
    expected = reference.infer({**next_feed({}, tokens, None), **reference.empty_feed(1, 3)})["logits"]
    assert np.abs(expected - runner.feed(tokens)).mean() < 4e-3 * max(1, np.abs(expected).mean())


def test_offsets_are_a_product_of_block_sums(model_of_blocks: Path, tmp_path: Path) -> None:
    """Projections with offsets of blocks: ONNX Runtime equals PyTorch over them, and weights that read the same value are one product."""
    adapter, random = tmp_path / "adapter", torch.Generator().manual_seed(1)
    adapter.mkdir()
    pair = {part: torch.randn(*shape, generator=random) * 0.3 for part, shape in (("A", (4, 256)), ("B", (256, 4)))}
    save_file(
        {f"model.layers.1.mlp.down_proj.lora_{x}.weight": y for x, y in pair.items()},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8.0}))
    options = ExportOptions(str(model_of_blocks), quantize="int4", overlays=(str(adapter),))
    package = export(options, tmp_path / "package")
    graph = onnx.load(package.model_path, load_external_data=False).graph
    thin = [n for n in graph.node if n.op_type == "MatMul" and n.input[1].startswith("block_sums.")]
    assert len(thin) == 3 * 3 - 1  # of each layer o_proj, gate and up together, and down, but for the one with a pair
    kinds = {i.name.rsplit(".", 1)[1]: i.data_type for i in graph.initializer if "layers.1.mlp.down_proj" in i.name}
    half = onnx.TensorProto.FLOAT16  # all that the source has in so many bits
    assert kinds == {
        "blocks": onnx.TensorProto.UINT8,
        "scales": half,
        "least": half,
        "middle": 1,
        "inner": 1,
        "outer": 1,
    }
    assert {f["method"] for f in package.manifest["quantization"]["roles"]["feed_forward"]} == {EXACT}
    held = package_model(options, package.path, package.manifest, rounded=True)
    plain = package_model(options, package.path, package.manifest)
    ids = random_ids(1, 20)
    with torch.no_grad():
        rounded, exact = (model(ids).logits for model in (held, plain))
    assert not torch.equal(exact, rounded)
    source = find_source(options)
    name = "model.layers.1.mlp.up_proj.weight"
    weights = dict(held.named_parameters())
    assert torch.equal(weights[name].detach(), value_of(source.weights[name]))
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(weights[name].detach(), value_of(source.weights[name]))
    reference, runner = TorchModel(package.manifest, held), OrtModel(package.path)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (1, 3))
    runner.start(1)
    feed = {**next_feed({}, tokens, None), **reference.empty_feed(1, 3)}
    expected, actual = reference.infer(feed)["logits"], runner.feed(tokens)
    # The sums are of numbers that are not rounded.
    assert np.abs(expected - actual).mean() < 0.02 * np.abs(expected).mean()


def test_five_bits_of_a_file_are_computed(tmp_path: Path) -> None:
    """Q5_K in codes of 8 bits around 0: what rounding a token's values errs is not multiplied by numbers that offsets take away again."""

    def coded(name: str, value: torch.Tensor) -> Any:
        if value.dim() != 2 or value.shape[-1] % 256 or "norm" in name:
            return None
        tensor = stored("Q5_K", *value.shape, len(name))
        tensor.data.reshape(len(value), -1, 176)[..., :4] = np.array([2e-4, 3e-3], "<f2").view(np.uint8)
        return tensor.data, tensor.tensor_type

    sizes = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", linear_model("lfm2", **sizes), coded)
    tokens = random_ids(1, 40)
    with torch.no_grad():
        expected = open_source(tmp_path / "m.gguf").read()(tokens).logits[:, -1].numpy()
    options = ExportOptions(str(tmp_path / "m.gguf"), quantize="int8")
    package = export(options, tmp_path / "package", options=OrtOptions(native=False))
    assert {f["method"] for f in package.manifest["quantization"]["roles"]["feed_forward"]} == {EXACT}
    runner = OrtModel(package.path)
    runner.start()
    assert np.abs(runner.feed(tokens.numpy())[:, -1] - expected).max() < 0.03 * np.abs(expected).max()
