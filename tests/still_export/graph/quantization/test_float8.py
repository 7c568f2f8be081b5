"""Weights in e4m3 for kernels of ours: rounded as torch rounds, kept as checkpoints have them, verified by bodies on the CPU."""

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
from safetensors.torch import load_file, save_file

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.forms import form_of, plan_forms
from still_export.graph.quantization.policy import Quantization, rounds_activations
from still_export.graph.quantization.quantizers import float8, relative_error
from still_export.graph.quantization.read import in_e4m3, round_activations, with_package_weights
from still_export.models.read.blocks import Float8Weight
from still_export.models.read.source import find_source
from still_export.models.read.weights import value_of
from still_export.package.folder import Package
from still_export.proof.package import VerifyOptions, verify
from still_export.targets.export import plan_job
from still_export.targets.registry import target_of
from still_kernels.dense_matmul.plan import Inputs, naive_dense_matmul
from tests.still_export.conftest import Exporter
from tests.still_export.graph.quantization.test_gpu_linear_layers import SIZES, empty_library
from tests.still_export.tiny import MIXED
from tests.still_export.training import make_base

LAYOUT = target_of("trt8").layout
GPU = {"quantize": "fp8", "native": True, "archs": ("sm_90",)}
SOFTMAX = ("full_attention",) * 3


def test_weights_are_rounded_as_torch_does() -> None:
    weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    weight[2, :128] = 0
    for block, shape in ((256, (5, 1)), (128, (5, 2))):
        made = float8(weight, block)
        assert made.scales.shape == shape
        scales = torch.from_numpy(made.scales).repeat_interleave(block, 1)
        numbers = (weight / torch.where(scales > 0, scales, 1)).to(torch.float8_e4m3fn).float() * scales
        assert torch.equal(torch.from_numpy(made.dequantized()), numbers)
        assert 0.02 < relative_error(made, weight) < 0.03
        assert isinstance(made.rows(slice(1, 3)), Float8Weight)
        assert np.array_equal(made.rows(slice(1, 3)).split(64).dequantized(), made.dequantized()[1:3])


@pytest.fixture
def package(export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch) -> Package:
    """As for GPUs, but without what is in the library."""
    monkeypatch.setattr("still_export.targets.ort.target.demand_build", lambda *a: None)
    monkeypatch.setattr("still_export.targets.ort.target.add_native", empty_library)
    return export_tiny("llama", "float16", GPU, sizes=SIZES, layer_types=SOFTMAX)


@pytest.mark.slow
def test_the_graph_computes_with_the_weights_that_it_holds(package: Package) -> None:
    graph = onnx.load(package.model_path).graph
    nodes = [n for n in graph.node if n.op_type == "DenseMatMul"]
    said = package.manifest["quantization"]
    assert (said["scheme"], said["nodes"], said["block_size"]) == ("fp8", "plugin", None)
    assert {role: {part["bits"] for part in parts} for role, parts in said["roles"].items() if role != "norm"} == {
        "projection": {8},
        "feed_forward": {8},
        "embedding": {None},
    }
    assert len(nodes) == 3 * 4 and all(n.input[5].endswith(".e4m3") for n in nodes)
    kinds = {i.name: (i.data_type, list(i.dims)) for i in graph.initializer}
    assert kinds["model.layers.0.mlp.down_proj.weight.e4m3"] == (onnx.TensorProto.INT32, [96, 40])
    assert kinds["model.layers.0.mlp.down_proj.weight.scales"] == (onnx.TensorProto.FLOAT, [1, 96])
    assert rounds_activations(package.manifest)
    source = find_source(ExportOptions.from_manifest(package.manifest))
    held = with_package_weights(source, package.path, package.manifest)
    name = "model.layers.1.self_attn.k_proj.weight"
    original = value_of(source.weights[name]).float()
    kept = torch.from_numpy(float8(original, original.shape[1]).dequantized())
    assert torch.equal(value_of(held.weights[name]).float(), kept.half().float())


def test_what_pytorch_rounds_is_what_the_op_does() -> None:
    """Of a whole package codes soon differ, wherever half precision turned one; of one layer nothing does."""
    random = torch.Generator().manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(256, 24, bias=False))
    made = float8(torch.randn(24, 256, generator=random), 128)
    layer[0].weight.data = torch.from_numpy(made.dequantized())
    round_activations(layer, {"0.weight": None}, 128, "fp8")
    x = torch.randn(2, 7, 256, generator=random)
    codes, scales = (
        torch.from_numpy(made.packed.reshape(24, 256)).view(torch.int32),
        torch.from_numpy(made.scales.T.copy()),
    )
    expected = naive_dense_matmul(Inputs(x, codes=codes, scales=scales))
    assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert (x @ layer[0].weight.data.T - expected).norm() > 0.02 * expected.norm()


@pytest.mark.slow
def test_verify_passes_and_fails_over_other_weights(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    options = VerifyOptions(lengths=(1, 33), decode_steps=4)
    assert verify(package.path, options).report.passed
    right = Float8Weight.dequantized
    monkeypatch.setattr(Float8Weight, "dequantized", lambda self: 1.5 * right(self))
    assert not verify(package.path, options).report.passed


def test_layers_that_choose_are_refused(export_tiny: Exporter) -> None:
    """Codes that parted turn more choices than near ties explain, so verify would fail the package."""
    with pytest.raises(UnsupportedError, match="--quantize fp8: layers of this model choose tokens"):
        export_tiny("llama", "float16", {"quantize": "fp8"}, "trt8", sizes=SIZES, layer_types=MIXED)


@pytest.mark.slow
def test_kernels_of_a_package(package: Package) -> None:
    from tests.still_export.graph.quantization.test_gpu_linear_layers import kernel_variants as of_nodes

    graph = onnx.load(package.model_path, load_external_data=False)
    for node in [n for n in graph.graph.node if n.domain == "still" and n.op_type != "DenseMatMul"]:
        graph.graph.node.remove(node)
    path = package.path / "products.onnx"
    onnx.save(graph, path)
    variants = of_nodes(path)["DenseMatMul"]
    assert {(v.float8, v.blocked, v.dtype) for v in variants} == {(1, 0, "float16")}


@pytest.mark.slow
def test_nodes_of_an_engine_take_norms_and_sums(export_tiny: Exporter, tmp_path: Path, monkeypatch: Any) -> None:
    from still_export.targets.trt.options import TrtOptions
    from tests.still_export import fake_tensorrt
    from tests.still_export.packages import lower_package

    monkeypatch.setattr(
        "still_export.targets.trt.package._write_plugins",
        lambda graph, target, *a: fake_tensorrt.write_libraries(target),
    )
    portable = export_tiny("llama", "float16", {"quantize": "fp8"}, "trt8", sizes=SIZES, layer_types=SOFTMAX)
    package = lower_package(portable, TrtOptions(archs=("sm_90",)), tmp_path, "trt8")
    graph = onnx.load(package.model_path, load_external_data=False).graph
    products = [n for n in graph.node if n.op_type == "DenseMatMul" and any(i.endswith(".e4m3") for i in n.input)]
    absent = [next(a.i for a in n.attribute if a.name == "absent_inputs") for n in products]
    counted = Counter((not bits & 8, not bits & 16) for bits in absent)  # norm_weight, residual
    assert counted == {(True, False): 6, (False, True): 6}
    kinds = Counter(n.op_type for n in graph.node if n.domain == "still")
    assert kinds["SwiGlu"] == 3 and not kinds["GatedMlp"]


def fp8_folder(base: Path, folder: Path, block: int) -> dict[str, torch.Tensor]:
    """`base` with linear layers in e4m3, one scale for an output or for blocks; the weights that they stand for."""
    shutil.copytree(base, folder)
    file, found = load_file(folder / "model.safetensors"), {}
    for key in [key for key in file if key.endswith("_proj.weight")]:
        weight = file[key].float()
        size = block or weight.shape[1]
        high = block or 1
        parts = weight.unflatten(1, (-1, size)).unflatten(0, (-1, high))
        scale = parts.abs().amax((1, 3)) / 300
        spread = scale.repeat_interleave(high, 0).repeat_interleave(size, 1)
        file[key] = (weight / spread).to(torch.float8_e4m3fn)
        file[f"{key}_scale{'_inv' if block else ''}"] = scale
        found[key] = file[key].float() * spread
    save_file(file, folder / "model.safetensors", {"format": "pt"})
    kind = (
        {"quant_method": "fp8", "weight_block_size": [block, block]}
        if block
        else {"quant_method": "compressed-tensors"}
    )
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": kind}))
    return found


@pytest.mark.parametrize("block", [0, 128])
def test_checkpoints_keep_their_codes(block: int, tmp_path: Path) -> None:
    make_base(
        tmp_path / "base",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        head_dim=32,
        num_hidden_layers=1,
        num_key_value_heads=4,
    )
    expected = fp8_folder(tmp_path / "base", tmp_path / "model", block)
    options = ExportOptions(str(tmp_path / "model"), attach_untrained=True, dtype="float16", quantize="fp8")
    source = find_source(options)
    asked = Quantization("fp8", layout=LAYOUT)
    roles = {name: "projection" if name in expected else "norm" for name in source.weights}
    asked, forms = plan_forms(source.weights, roles, asked)
    assert asked.block_size == block and {forms[name].method for name in expected} == {"exact"}
    for name, value in expected.items():
        held = source.weights[name]
        assert np.array_equal(held.blocks.read().split(asked.block_of(8, value.shape[1])).dequantized(), value.numpy())  # type: ignore
        assert form_of(held, "projection", Quantization("int8", layout=LAYOUT)).method == "rtn"  # type: ignore[union-attr]


def test_tokens_are_rounded_each() -> None:
    x = torch.tensor([[448.0, 17.0, 0.0009, 0.0], [0.0, 0.0, 0.0, 0.0], [896.0, 17.0, 34.0, -36.0]])
    assert in_e4m3(x).tolist() == [[448.0, 16.0, 0.0, 0.0], [0.0] * 4, [896.0, 16.0, 32.0, -36.0]]


@pytest.mark.parametrize(
    "flags, error, message",
    [
        (
            {"dtype": "float16"},
            ConfigError,
            "MatMulNBits has no weights in e4m3. Export with --to onnx --dtype float16 and",
        ),
        ({"archs": ("sm_90",)}, ConfigError, "has no weights in e4m3"),
        (
            {"archs": ("sm_80", "sm_90"), "dtype": "float16"},
            UnsupportedError,
            "--arch sm_80: no matrix instructions for e4m3",
        ),
        (
            {"archs": ("sm_90",), "dtype": "float16", "quantize_block": 64},
            ConfigError,
            "--quantize-block 64: fp8 has 128",
        ),
        ({"archs": ("sm_90",), "dtype": "float16", "quantize_method": "gptq"}, ConfigError, "are for --quantize int4"),
    ],
    ids=str,
)
def test_what_it_is_not_for_is_named(flags: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_job("onnx", {"model": "here", "quantize": "fp8", **flags})
    assert plan_job("onnx", {"model": "here", "quantize": "fp8", "dtype": "float16", "archs": ("sm_89", "sm_90")})


def test_blocks_that_do_not_divide_and_experts_are_named() -> None:
    asked = Quantization("fp8", block_size=128, layout=LAYOUT)
    with pytest.raises(UnsupportedError, match=r"a\.weight has 192 inputs, which blocks of 128 do not divide"):
        plan_forms({"a.weight": torch.zeros(8, 192)}, {"a.weight": "projection"}, asked)
    with pytest.raises(UnsupportedError, match="experts have no form in e4m3"):
        form_of(torch.zeros(2, 8, 128), "feed_forward", asked)
