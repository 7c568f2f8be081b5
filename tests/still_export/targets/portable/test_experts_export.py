"""Families with experts end to end: transformers' folder in, package out, proven on ONNX Runtime's CPU provider; targets that refuse."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch

from still_export.errors import UnsupportedError
from still_export.graph.quantization.experts import StackedWeight
from still_export.graph.quantization.forms import Form
from still_export.graph.quantization.policy import Quantization
from still_export.models.load import open_source
from still_export.models.read.weights import Deferred
from still_export.targets.ort.kernels import kernel_variants as variants_for_cuda
from still_export.targets.registry import target_of
from still_export.targets.trt.package import kernel_variants
from tests.still_export.expert_models import SPARSE, expert_model
from tests.still_export.models.test_linear_families import calm_seed
from tests.still_export.targets.portable.test_linear_export import call
from tests.still_export.tiny import plain_model
from tests.still_graphs.passes import run_passes

FEW = ("granitemoehybrid",)
CASES = [pytest.param(f, marks=pytest.mark.slow if f in FEW else pytest.mark.long) for f in SPARSE]


@pytest.mark.parametrize("name", CASES)
def test_a_folder_becomes_a_proven_package(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expert_model(name, seed=calm_seed(name)).save_pretrained(tmp_path / "model")
    package = tmp_path / "package"
    assert call("export", tmp_path / "model", "-o", package, "--quiet") == 0
    assert call("verify", package, "--lengths", "1,65", "--decode-steps", "4", "--quiet") == 0, capsys.readouterr().out
    own = "Loop" if name.startswith("nemotron_h") else "MoE"  # which has no relu2
    for graph, op in (("model.onnx", own), ("portable.onnx", "Loop")):
        bodies = onnx.load(package / graph, load_external_data=False).functions
        assert [op in {n.op_type for n in f.node} for f in bodies if f.name == "Experts"] == (
            [] if name.endswith("dense") else [True]
        )
    if not name.endswith("dense"):
        covered_on_gpus(package)


def covered_on_gpus(package: Path) -> None:
    """Kernels of GPUs cover router and experts in ONNX Runtime and, as plugins, in TensorRT."""
    assert {"Route", "Experts"} <= variants_for_cuda(package / "portable.onnx").keys()
    graph = onnx.load(package / "portable.onnx", load_external_data=False)
    run_passes(graph, target_of("trt").passes)
    assert {"Route", "Experts"} <= kernel_variants(onnx_ir.from_proto(graph)).keys()


@pytest.mark.long
def test_a_softmax_model_with_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-MoE, of which linearize makes hybrid layers."""
    plain_model("qwen3_moe", torch.float32).save_pretrained(tmp_path / "model")
    package = tmp_path / "package"
    assert call("export", tmp_path / "model", "--attach-untrained", "-o", package, "--quiet") == 0
    assert call("verify", package, "--lengths", "1,65", "--decode-steps", "4", "--quiet") == 0, capsys.readouterr().out


WIDE: dict[str, Any] = dict(
    hidden_size=48,
    intermediate_size=64,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_attention_heads=4,
)
"""Multiples of 16, that blocks divide."""


@pytest.mark.parametrize(
    "scheme, dtype",
    [
        pytest.param("int4", "float32", marks=pytest.mark.slow),
        pytest.param("int8", "float32", marks=pytest.mark.long),
        pytest.param("int4", "float16", marks=pytest.mark.long),
    ],
)
def test_quantized_experts(scheme: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held to PyTorch with the package's own codes; the router keeps 16 bits."""
    expert_model("qwen3_5_moe", seed=3, **WIDE).save_pretrained(tmp_path / "model")
    package, given = tmp_path / "package", ("--quantize", scheme, "--quantize-block", "16", "--dtype", dtype)
    assert call("export", tmp_path / "model", "-o", package, *given, "--quiet") == 0
    assert call("verify", package, "--lengths", "1,65", "--decode-steps", "4", "--quiet") == 0, capsys.readouterr().out
    roles = json.loads((package / "manifest.json").read_text())["quantization"]["roles"]
    assert {each["bits"] for each in roles["router"]} == {16} and {each["bits"] for each in roles["gate"]} == {8}
    graph = onnx.load(package / "model.onnx", load_external_data=False)
    assert [n.op_type for n in graph.graph.node].count("ExpertsNBits") == 3
    assert ["QMoE" in {n.op_type for n in f.node} for f in graph.functions if f.name == "ExpertsNBits"] == [True]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_linear"])
def test_near_ties_of_a_router_are_no_faults_and_faults_no_near_ties(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float16 some tokens go elsewhere than in float32, where their scores nearly tie; one row of a router that is 5% larger sends
    some elsewhere that do not tie."""
    model = expert_model(name, seed=3)
    model.save_pretrained(tmp_path / "model")
    package, given = tmp_path / "package", ("--lengths", "1,65,200", "--decode-steps", "24", "--quiet")
    assert call("export", tmp_path / "model", "-o", package, "--dtype", "float16", "--quiet") == 0
    assert call("verify", package, *given) == 0, capsys.readouterr().out
    found = json.loads((package / "verify/report.json").read_text())["selections"]
    assert found["compared"] > 1000 and found["near_ties"] > 0 == found["wrong"]
    router = next(x for n, x in model.named_parameters() if n.endswith("gate.weight") and ".1." in n)
    with torch.no_grad():
        router[2] *= 1.05
    model.save_pretrained(tmp_path / "other")
    assert call("verify", package, "--model", tmp_path / "other", *given) == 1
    found = json.loads((package / "verify/report.json").read_text())["selections"]
    assert found["wrong"] > 0


def test_experts_are_quantized_one_at_a_time(tmp_path: Path) -> None:
    """No stack of numbers is made; codes and scales are those of each expert alone."""
    expert_model("qwen3_5_moe", **WIDE).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.gate_up"
    held = open_source(tmp_path).weights[name]
    assert isinstance(held, Deferred) and held.part is not None
    asked, form = Quantization("int4", block_size=16), Form(4, "rtn", held, zero_points=True)
    unread = replace(held, read=lambda: pytest.fail("the whole stack was read"))
    made = StackedWeight(name, unread, form, asked, {}).made
    value = held.read()
    assert len(made) == len(value) == 7
    for number, blocks in enumerate(made):
        step = float(abs(blocks.scales).max())
        assert abs(torch.from_numpy(blocks.dequantized()) - value[number]).max() <= 0.51 * step


@pytest.mark.parametrize("target", ["trt-rtx", "genai", "web"])
def test_targets_without_experts_refuse_by_name(target: str) -> None:
    """Before anything is traced."""
    record = target_of(target)
    manifest = {"ops": {"Experts": 1}, "model": {"family": "qwen3_next", "dtype": record.dtypes[0]}}
    with pytest.raises(UnsupportedError, match="has no Experts yet, which layers of this qwen3_next model need"):
        record.check_model(manifest, None)
