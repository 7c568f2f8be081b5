"""Low-bit weights for TensorRT: standard nodes that dequantize them, which TensorRT-RTX reads and builds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from still_export.engines.build import build_engines
from still_export.engines.builder import BuildError
from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization import read
from still_export.graph.quantization.forms import EXACT, form_of
from still_export.graph.quantization.gemm import DequantizedProduct
from still_export.graph.quantization.policy import DEQUANTIZED, Layout, Quantization
from still_export.graph.quantization.quantizers import quantize
from still_export.graph.quantization.read import with_package_weights
from still_export.graph.quantization.stored import StoredWeight
from still_export.loading.torch import TorchModel
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.source import find_source
from still_export.models.read.weights import Deferred, SourceBlocks, value_of
from still_export.package.calls import next_feed
from still_export.package.folder import Package
from still_export.package.trust import trust_package
from still_export.runtime.ort import OrtModel
from still_export.targets.export import plan_job
from still_export.targets.trt.options import RtxOptions, TrtOptions
from still_export.targets.trt.plugins import INCLUDE_VARIABLE, PluginBuildError, tensorrt_major
from tests.still_export import fake_tensorrt
from tests.still_export.conftest import Exporter
from tests.still_export.packages import lower_package, needs_rtx, trt_package
from tests.still_export.tiny import MIXED, VOCAB
from tests.still_export.verbs import call
from tests.still_graphs.protos import attribute, opset_version

SIZES = dict(hidden_size=128, intermediate_size=192, num_attention_heads=8, head_dim=16, tie_word_embeddings=False)

INT4 = ("int4", "float32", "trt")
INT8 = pytest.param(("int8", "float32", "trt"), marks=pytest.mark.long)
RTX = [pytest.param((*what, "trt-rtx"), marks=pytest.mark.long) for what in (("int4", "float16"), ("int8", "bfloat16"))]


def headers(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "NvInfer.h").write_text("")
    (folder / "NvInferVersion.h").write_text(text)
    return folder


def test_version_of_headers(tmp_path: Path) -> None:
    old = headers(tmp_path / "8", "#define NV_TENSORRT_MAJOR 8 //!< TensorRT major version.\n")
    new = headers(tmp_path / "11", "#define TRT_MAJOR_ENTERPRISE 11\n#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n")
    assert (tensorrt_major(old), tensorrt_major(new)) == (8, 11)
    with pytest.raises(PluginBuildError, match=r"NvInferVersion\.h does not state its version"):
        tensorrt_major(headers(tmp_path / "none", ""))


def test_what_tensorrt_has_not_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(target: str, **asked: Any) -> None:
        plan_job(target, {"model": "nowhere", **asked})

    monkeypatch.delenv(INCLUDE_VARIABLE, raising=False)
    monkeypatch.setattr("still_export.targets.trt.plugins.USUAL_INCLUDES", ())
    with pytest.raises(ConfigError, match=r"--quantize-block 32: TensorRT's INT4 has 64, 128\."):
        plan("trt", quantize="int4", quantize_block=32)
    with pytest.raises(ConfigError, match="--quantize-block is for --quantize int4: --to trt has a scale for each"):
        plan("trt", quantize="int8", quantize_block=64)
    plan("trt", quantize="int4", quantize_block=128)
    plan("trt-rtx", quantize="int8", quantize_block=32)
    monkeypatch.setattr("still_export.targets.export.write_portable", lambda *_, **__: pytest.fail("exported first"))
    old = (str(headers(tmp_path / "8", "#define NV_TENSORRT_MAJOR 8\n")),)
    plan("trt", quantize="int4", quantize_block=32, quantize_method="rtn", tensorrt_include=old)
    with pytest.raises(ConfigError, match=r"--quantize-block 16: the plugin for TensorRT 8\.6 has 32, 64, 128\."):
        plan("trt", quantize="int4", quantize_block=16, tensorrt_include=old)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            UnsupportedError, match=rf"--quantize int4 beside --dtype {dtype}: .* multiplies with float16"
        ):
            plan("trt", dtype=dtype, quantize="int4", tensorrt_include=old)
    assert not (tmp_path / "x").exists()


def test_tensorrt_8_builds_no_quantized_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = trt_package(tmp_path / "trt", monkeypatch)
    package.manifest["quantization"] = {"scheme": "int4", "block_size": 64, "lora": "apart", "roles": {}}
    fake_tensorrt.install(monkeypatch, "8.6.1")
    with pytest.raises(BuildError, match=r"are int4, which TensorRT 8\.6\.1 does not read; build with TensorRT 10"):
        build_engines(package)


@pytest.fixture
def portable(request: Any, export_tiny: Exporter) -> Package:
    scheme, dtype, target = request.param
    return export_tiny("llama", dtype, {"quantize": scheme}, target, sizes=SIZES, layer_types=MIXED)


@pytest.fixture(autouse=True)
def activations_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime, which stands in for TensorRT, makes MatMulNBits of such products by itself: without rounding activations."""
    original = onnxruntime.SessionOptions

    def options() -> Any:
        made = original()
        made.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        return made

    monkeypatch.setattr(onnxruntime, "SessionOptions", options)


def test_scales_are_positive() -> None:
    """TensorRT-RTX refuses 8-bit weights whose scales are not, also where they are 0 once they are float16."""
    weight = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    weight[1], weight[2] = 0, 1e-9
    weight[3] -= 8  # the signed extreme is negative
    weight[4] += 8
    for bits in (4, 8):
        found = quantize(torch.from_numpy(weight), bits, 32, zero_points=False)
        assert found.zero_points is None and (found.scales.astype(np.float16) > 0).all()
        step = np.repeat(found.scales, 32, axis=1)
        assert (np.abs(found.dequantized() - weight) <= 0.51 * step).all()


def signed_blocks(bits: int) -> BlockWeight:
    """A source's blocks: scales of both signs, dead ones, and all codes, the least of which has no negative."""
    random = np.random.default_rng(bits)
    packed = random.integers(0, 256, (6, 4, 32 * bits // 8)).astype(np.uint8)
    packed[0, 0], packed[1, 1] = 0, 255
    scales = random.standard_normal((6, 4)).astype(np.float16)
    scales[2, 1], scales[3, 2], scales[0, 0], scales[1, 1] = 0, 0, -0.5, -0.25
    return BlockWeight(packed, scales.astype(np.float32), None, bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_a_source_turn_their_sign(bits: int) -> None:
    """To the bit, with an offset beside; scales that half precision holds as 0 are none."""
    blocks = signed_blocks(bits)
    blocks.scales[4, 3] = 1e-9
    found = blocks.with_positive_scales(np.dtype(np.float16))
    assert (found.scales.astype(np.float16) > 0).all() and found.offsets is not None
    expected = blocks.dequantized()
    expected[4, 96:] = 0
    np.testing.assert_array_equal(found.dequantized(), expected)
    alike = replace(blocks, scales=np.abs(blocks.scales))
    assert alike.with_positive_scales(np.dtype(np.float32)).offsets is None
    again = replace(blocks, offsets=np.ones((6, 4), np.float32)).with_positive_scales(np.dtype(np.float16))
    np.testing.assert_array_equal(again.dequantized(), expected + 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_over_such_a_source(bits: int) -> None:
    """Its graph has positive scales alone, and the source's numbers."""
    blocks = signed_blocks(bits)
    values = torch.from_numpy(blocks.dequantized())
    source = SourceBlocks(bits, False, False, lambda: blocks)
    weight = Deferred(values.shape, torch.float32, lambda: values, source, bits)
    layout = Layout("a compiler's", (32,), DEQUANTIZED, blocks_of_eight=True)
    asked = Quantization(f"int{bits}", layout=layout, block_size=32)
    form = form_of(weight, "projection", asked)
    assert form is not None and (form.method, form.offsets) == (EXACT, True)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 128])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 6])
    held = onnx.numpy_helper.from_array(values.numpy().T.copy(), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], name="node")], "g", [x], [y], [held])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    stored = StoredWeight("w", weight, form, asked, "projection", {})
    DequantizedProduct(model, [stored]).write([next(iter(model.graph))])
    del model.graph.initializers["w"]
    made = ir.to_proto(model)
    scales = {i.name: onnx.numpy_helper.to_array(i) for i in made.graph.initializer if i.name.endswith(".scales")}
    assert scales and all((s > 0).all() for s in scales.values())
    given = np.random.default_rng(1).standard_normal((2, 3, 128)).astype(np.float32)
    (found,) = onnxruntime.InferenceSession(made.SerializeToString(), onnxruntime.SessionOptions()).run(
        None, {"x": given}
    )
    np.testing.assert_allclose(found, given @ values.numpy().T, rtol=1e-4, atol=1e-4)


def codes(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    return {i.name: i for i in graph.initializer if i.name.endswith(".codes")}


@pytest.mark.slow
@pytest.mark.parametrize("portable", [INT4, INT8], indirect=True, ids=str)
def test_the_graph_computes_with_the_weights_that_it_holds(portable: Package) -> None:
    """Standard ops alone; equal to PyTorch over the weights that are read back, which are as close to the original as their bits allow."""
    graph = onnx.load(portable.model_path).graph
    assert {n.domain for n in graph.node} == {"", "still"}
    scheme = portable.manifest["quantization"]["scheme"]
    low = TensorProto.INT4 if scheme == "int4" else TensorProto.INT8
    kinds = {name: tensor.data_type for name, tensor in codes(graph).items()}
    assert kinds["model.layers.0.mlp.down_proj.weight.codes"] == low
    assert kinds["lm_head.weight.codes"] == TensorProto.INT8
    gates = [kind for name, kind in kinds.items() if "g_proj" in name]
    assert gates and set(gates) == {TensorProto.INT8}
    assert "model.embed_tokens.weight" in {i.name for i in graph.initializer}
    source = find_source(ExportOptions.from_manifest(portable.manifest))
    held = with_package_weights(source, portable.path, portable.manifest)
    for name, step in (
        ("model.layers.0.mlp.down_proj.weight", 7 if scheme == "int4" else 127),
        ("lm_head.weight", 127),
    ):
        kept, original = (value_of(s.weights[name]) for s in (held, source))
        most = original.abs().amax(-1, keepdim=True) / step
        assert bool(((kept - original).abs() <= 0.51 * most).all()) and not torch.equal(kept, original)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (1, 20))
    runner = OrtModel(portable.path)
    runner.start(1)
    actual, errors = runner.feed(tokens), {}
    for name, model in (("held", held.read()), ("original", source.read())):
        reference = TorchModel(portable.manifest, model)
        feed = {**next_feed({}, tokens, None), **reference.empty_feed(1, 20)}
        errors[name] = float(np.abs(reference.infer(feed)["logits"] - actual).max())
    assert errors["held"] < 1e-4 < 1e-2 < errors["original"], errors


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("portable", [INT4, *RTX], indirect=True, ids=str)
def test_tensorrt_rtx_builds_quantized_weights(portable: Package, tmp_path: Path) -> None:
    (tmp_path / "rtx").mkdir()
    trt = RtxOptions(prefill_tokens=32, archs=("sm_89",))
    package = lower_package(portable, trt, tmp_path / "rtx")
    graph = onnx.load(package.model_path).graph
    assert len(codes(graph)) == sum(n.op_type == "DequantizeLinear" for n in graph.node) > 8
    blocks = {attribute(n, "block_size") for n in graph.node if n.op_type == "DequantizeLinear"}
    assert blocks in ({64, None}, {32})
    (engine,) = build_engines(package)
    assert engine.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("portable", [("int4", "float16", "trt")], indirect=True, ids=str)
def test_verify_of_a_quantized_engine(
    portable: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the stand-in, whose engine computes what the lowered graph says: passed, and failed over other weights than it holds."""
    fake_tensorrt.deploy(monkeypatch, "10.3.0")
    folder = tmp_path / "package"
    folder.mkdir()
    package = lower_package(portable, TrtOptions(batch=2, prefill_tokens=32), folder)
    trust_package(folder)
    model = onnx.load(package.model_path)
    onnx.checker.check_model(model)
    assert opset_version(model) == 21 and model.ir_version == 10
    blocks = [attribute(n, "block_size") for n in model.graph.node if n.op_type == "DequantizeLinear"]
    assert set(blocks) == {64, None}
    arguments = [str(folder), "--lengths", "1,9", "--decode-steps", "5", "--quiet"]

    assert call("build", str(folder), "--quiet") == 0
    assert call("verify", *arguments) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "quantization loss on 64 random tokens: KL" in said and "rounded to 8 bits" not in said
    loss = json.loads((folder / "verify/report.json").read_text())["quantization_loss"]
    assert loss["kl"] > 0 and loss["kl_rounded"] is None
    shutil.rmtree(folder / "verify")
    monkeypatch.setattr(read, "row_readers", lambda *_: {})
    assert call("verify", *arguments) == 1
