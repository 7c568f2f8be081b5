"""Linear families end to end: transformers' folder in, package out, proven on ONNX Runtime's CPU provider and in PyTorch, run."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from still_export.loading.torch import TorchModel
from still_export.models.load import load_model
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_export.targets.ort.kernels import kernel_variants
from still_export.targets.trt import package as trt_package
from tests.still_export.expert_models import DEEP, deep_model
from tests.still_export.fla_models import SOFTMAX
from tests.still_export.linear_models import FAMILIES, VOCAB, linear_model
from tests.still_export.models.formulas import add_half, demand_package
from tests.still_export.packages import needs_rtx
from tests.still_export.targets.ort.test_native import built
from tests.still_export.verbs import call

__all__ = ["built"]

FEW = ("qwen3_5_text", "granitemoehybrid")
CASES = [pytest.param(f, marks=pytest.mark.slow if f in FEW else pytest.mark.long) for f in FAMILIES]
HALF = ("mamba", "falcon_h1", "transnormer", "mirrorla")
"""One of each kind: a residual in float32, rows of shared factors, a norm without weights, weights computed of several."""


@pytest.mark.parametrize("family", CASES)
def test_a_folder_becomes_a_proven_package(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear_model(family).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--quiet") == 0
    assert call("verify", tmp_path / "package", "--lengths", "1,130", "--decode-steps", "8", "--quiet") == 0, (
        capsys.readouterr().out
    )
    model = OrtModel(tmp_path / "package", threads=1)
    prompt = torch.randint(3, VOCAB, (1, 90), generator=torch.Generator().manual_seed(2))
    model.start()
    answer = list(model.generate(prompt[0].tolist(), 8, Sampling()))
    reference = load_model(tmp_path / "model")
    if model.feeding.every:  # PyTorch's own generate puts nothing between
        runner = TorchModel(model.manifest, reference)
        runner.start()
        expected = list(runner.generate(prompt[0].tolist(), 8, Sampling()))
    else:
        expected = reference.generate(prompt, max_new_tokens=8, do_sample=False)[0, 90:].tolist()
    assert answer[: len(expected)] == expected
    assert len(expected) == 8 or expected[-1] == reference.generation_config.eos_token_id
    nodes = {n.op_type for n in onnx.load(tmp_path / "package/model.onnx", load_external_data=False).graph.node}
    ops = json.loads((tmp_path / "package/manifest.json").read_text())["ops"]
    assert ops and set(ops) <= nodes


@pytest.mark.slow
@pytest.mark.parametrize("family", DEEP)
@torch.no_grad()
def test_seven_layers_of_which_equal_ones_are_traced_twice(family: str, tmp_path: Path) -> None:
    deep_model(family).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--all-logits", "--quiet") == 0
    made, reference = OrtModel(tmp_path / "package", threads=1), load_model(tmp_path / "model")
    assert made.manifest["model"]["layers"] == len(reference.model.layers) >= 6
    prompt = torch.randint(3, VOCAB, (1, 5), generator=torch.Generator().manual_seed(2))
    made.start()
    expected = reference(prompt, use_cache=False).logits
    assert (torch.from_numpy(made.feed(prompt.numpy())) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.slow if each in HALF else pytest.mark.long) for each in FAMILIES]
)
def test_a_package_in_half_precision(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear_model(family).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--dtype", "float16", "--quiet") == 0
    assert call("verify", tmp_path / "package", "--lengths", "1,65", "--decode-steps", "4", "--quiet") == 0, (
        capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--quantize", "int4")])
def test_layers_that_share_weights(flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shared weight is stored once, and one that is changed is seen."""
    model = linear_model(
        "zamba2",
        seed=1,
        **(dict.fromkeys(("hidden_size", "intermediate_size"), 96) | {"adapter_rank": 32} if flags else {}),
    )
    demand_package(
        model, tmp_path, capsys, *flags, short=True, plant=None if flags else ((".block_norm.weight",), add_half)
    )
    weights = onnx.load(tmp_path / "package/model.onnx", load_external_data=False).graph.initializer
    assert sum(".block_norm." in weight.name for weight in weights) == 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--quantize", "int4")])
def test_gates_of_blocks(flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RecurrentGemma with several equal layers in turn; a decay that is changed is seen."""
    sizes = dict.fromkeys(("hidden_size", "lru_width"), 96) | {"intermediate_size": 192} if flags else {}
    kinds = ["recurrent", "recurrent", "attention"]
    model = linear_model("recurrent_gemma", seed=1, num_hidden_layers=6, block_types=kinds, **sizes)
    plant = (("4.temporal_block.rg_lru.recurrent_param",), add_half)
    demand_package(model, tmp_path, capsys, *flags, short=True, plant=None if flags else plant)


@pytest.mark.slow
def test_a_package_at_the_opset_that_has_the_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ops of ai.onnx alone, whose kernels ONNX Runtime has."""
    linear_model("qwen3_5_text").save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--opset", "27", "--quiet") == 0
    model = onnx.load(tmp_path / "package/model.onnx", load_external_data=False)
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 27), ("still", 1)}
    nodes = [n.op_type for f in model.functions for n in f.node]
    assert {"LinearAttention", "CausalConvWithState"} <= set(nodes)
    sizes = ("--lengths", "1,65", "--decode-steps", "4")
    assert call("verify", tmp_path / "package", *sizes, "--quiet") == 0, capsys.readouterr().out
    assert call("export", tmp_path / "model", "-o", tmp_path / "other", "--opset", "25", "--quiet") == 2
    assert "--opset 25 is unknown; known: 23, 27." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_native_kernels_run_it(built: None, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear_model("qwen3_5_text").save_pretrained(tmp_path / "model")
    package = tmp_path / "package"
    assert call("export", tmp_path / "model", "-o", package, "--native", "--dtype", dtype, "--quiet") == 0
    sizes = ("--lengths", "1,130", "--decode-steps", "8")
    assert call("verify", package, *sizes, "--quiet") == 0, capsys.readouterr().out
    assert OrtModel(package, threads=1).native is not None
    check_kernels(package / "model.onnx", (24, 20, "gated_delta", 4, 0), dtype)


@pytest.mark.long
def test_kernels_of_the_gpu_follow_from_the_graph(tmp_path: Path) -> None:
    linear_model("granitemoehybrid").save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--dtype", "float16", "--quiet") == 0
    check_kernels(tmp_path / "package/model.onnx", (10, 8, "gated", 4, 1), "float16")


def check_kernels(model: Path, expected: tuple[object, ...], dtype: str) -> None:
    """One variant for each rule and convolution, with ONNX Runtime's counts, from what the portable graph tells."""
    found = kernel_variants(model)
    assert set(found) == {"LinearAttention", "CausalConv", "Attention"}
    ((rule,), (conv,)) = found["LinearAttention"], found["CausalConv"]
    assert (rule.head_dim, rule.value_dim, rule.update_rule, conv.taps, conv.bias) == expected
    assert (rule.dtype, rule.shared, rule.per_key) == (dtype, 1, 0)
    assert (conv.dtype, conv.activation, conv.aligned, conv.count_dtype) == (dtype, "silu", 1, "int64")


@pytest.mark.parametrize(
    "family",
    [pytest.param("qwen3_5_text", marks=pytest.mark.slow), pytest.param("granitemoehybrid", marks=pytest.mark.long)],
)
def test_kernels_of_tensorrt_follow_from_the_graph(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the plugin nodes that the graph is lowered to: every layer has one of each op, with TensorRT's counts."""
    found: dict[str, list[Any]] = {}

    def write_plugins(graph: Any, *_: Any) -> dict[str, str]:
        found.update(trt_package.kernel_variants(graph))
        return {}

    monkeypatch.setattr("still_export.targets.trt.package._write_plugins", write_plugins)
    linear_model(family).save_pretrained(tmp_path / "model")
    assert call(tmp_path / "model", "--to", "trt", "-o", tmp_path / "package", "--quiet") == 0
    ((rule,), (conv,)) = found["LinearAttention"], found["CausalConv"]
    assert (rule.count_dtype, conv.count_dtype, rule.shared, rule.per_key) == ("int32", "int32", 1, 0)
    assert rule.update_rule == {"qwen3_5_text": "gated_delta", "granitemoehybrid": "gated"}[family]
    layers = json.loads((tmp_path / "package/manifest.json").read_text())["plugin_layers"]
    assert layers["LinearAttention"] == layers["CausalConv"] == 2
    check_shapes(tmp_path / "package/model.onnx")


def check_shapes(model: Path) -> None:
    """Nothing of float32 changes its shape: TensorRT 8.6 takes such a reshape for one of float16 and finds no kernel."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(model, load_external_data=False)).graph
    wide = {v.name for v in graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    moved = ("Reshape", "Unsqueeze", "Squeeze", "Transpose", "Expand")
    assert not [n.name for n in graph.node if n.op_type in moved and n.output[0] in wide]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trt", "onnx"])
@pytest.mark.parametrize(
    "family, changes, why",
    [
        ("lfm2", dict(conv_L_cache=20, layer_types=["conv", "full_attention"]), "20 taps; the kernels have at most 16"),
        ("gla", dict(attn={**SOFTMAX, "window_size": 37}), "local='sliding'; the kernels have 'chunked'"),
    ],
    ids=["taps", "window"],
)
def test_gpu_kernels_that_are_not_there_are_refused(
    family: str, changes: dict[str, Any], why: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, before anything is left behind."""
    linear_model(family, num_hidden_layers=2, **changes).save_pretrained(tmp_path / "model")
    output = tmp_path / "package"
    arguments = (
        ["--to", "trt"] if target == "trt" else ["--to", "onnx", "--native", "--arch", "sm_90", "--dtype", "float16"]
    )
    assert call(tmp_path / "model", *arguments, "-o", output, "--quiet") == 2
    assert why in capsys.readouterr().err
    assert not output.exists()


@needs_rtx
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.long) for f in FAMILIES])
def test_tensorrt_rtx_builds_an_engine(family: str, tmp_path: Path) -> None:
    """Of the bodies in the place of plugins; the GPU that it is for is not needed."""
    linear_model(family).save_pretrained(tmp_path / "model")
    options = ("--to", "trt-rtx", "--arch", "sm_89", "--prefill-tokens", "64", "--quiet")
    assert call(tmp_path / "model", *options, "-o", tmp_path / "package") == 0
    (engine,) = json.loads((tmp_path / "package/manifest.json").read_text())["engines"]
    assert (tmp_path / "package" / engine["file"]).stat().st_size == engine["size_bytes"] > 0
