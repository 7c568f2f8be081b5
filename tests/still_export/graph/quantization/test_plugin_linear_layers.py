"""Low-bit weights for TensorRT 8.6, which has none: products of a plugin, with the blocks of com.microsoft::MatMulNBits in words."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto

from still_export.graph.quantization import read
from still_export.graph.quantization.forms import EXACT, form_of
from still_export.graph.quantization.policy import Quantization
from still_export.graph.quantization.quantizers import quantize
from still_export.models.read.weights import Deferred
from still_export.package.folder import Package
from still_export.package.trust import trust_package
from still_export.targets.registry import target_of
from still_export.targets.trt.options import TrtOptions
from still_export.targets.trt.package import kernel_variants
from tests.still_export import fake_tensorrt
from tests.still_export.conftest import Exporter
from tests.still_export.packages import lower_package
from tests.still_export.tiny import MIXED
from tests.still_export.verbs import call
from tests.still_graphs.protos import attribute, opset_version

SIZES = dict(hidden_size=96, intermediate_size=160, num_attention_heads=8, head_dim=16, tie_word_embeddings=False)
INT4, INT8 = ("int4", "float16"), pytest.param(("int8", "float16"), marks=pytest.mark.long)


@pytest.fixture
def portable(request: Any, export_tiny: Exporter) -> Package:
    scheme, dtype = request.param
    return export_tiny("llama", dtype, {"quantize": scheme}, "trt8", sizes=SIZES, layer_types=MIXED)


def test_blocks_of_a_file_stay_as_they_are() -> None:
    """Of 8 bits too, whose scales may be negative, as those of TensorRT may not."""
    from still_export.models.read.weights import SourceBlocks

    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    for bits in (4, 8):
        blocks = SourceBlocks(bits, False, True, lambda bits=bits: quantize(weight, bits, 32))  # type: ignore[misc]
        given = Deferred((6, 64), torch.float32, lambda: weight, blocks=blocks)
        role = "feed_forward" if bits == 4 else "head"
        methods = [form_of(given, role, Quantization("int4", layout=target_of(t).layout)) for t in ("trt8", "trt")]
        assert [form.method for form in methods if form] == [EXACT, "rtn"], bits


@pytest.mark.slow
@pytest.mark.parametrize("portable", [INT4, INT8], indirect=True, ids=str)
def test_products_are_the_plugins(portable: Package) -> None:
    graph = onnx.load(portable.model_path).graph
    said = portable.manifest["quantization"]
    assert said["nodes"] == "plugin" and said["block_size"] == 32
    low = {"int4": 4, "int8": 8}[said["scheme"]]
    nodes = [n for n in graph.node if n.op_type == "MatMulNBits"]
    assert {(n.domain, attribute(n, "block_size")) for n in nodes} == {("still", 32)}
    products, gates = 3 * 4, 2 if low == 4 else 0
    expected = Counter({low: products})
    expected[8] += gates + 1
    assert Counter(attribute(n, "bits") for n in nodes) == expected
    kinds = {i.name: (i.data_type, list(i.dims)) for i in graph.initializer}
    assert kinds["model.layers.0.mlp.down_proj.weight.blocks"] == (TensorProto.INT32, [96, 160 * low // 32])
    assert kinds["model.layers.0.mlp.down_proj.weight.scales"] == (TensorProto.FLOAT16, [96, 5])
    if low == 4:
        assert kinds["model.layers.0.mlp.down_proj.weight.zero_points"] == (TensorProto.INT32, [96, 1])


@pytest.mark.slow
@pytest.mark.parametrize("portable", [INT4], indirect=True, ids=str)
def test_kernels_and_verify_of_an_engine(
    portable: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the stand-in for TensorRT 8.6, whose engine computes what the lowered graph says: passed, and failed over other weights."""
    fake_tensorrt.deploy(monkeypatch, "8.6.1")
    folder = tmp_path / "package"
    folder.mkdir()
    package = lower_package(portable, TrtOptions(batch=2, prefill_tokens=32), folder, "trt8")
    trust_package(folder)
    model = onnx.load(package.model_path)
    assert opset_version(model) == 17
    for node in [n for n in model.graph.node if n.domain == "still" and n.op_type != "MatMulNBits"]:
        model.graph.node.remove(node)  # of chunks too small for kernels
    variants = {(v.bits, v.zero_points, v.block_size) for v in kernel_variants(ir.from_proto(model))["MatMulNBits"]}
    assert variants == {(4, 1, 32), (8, 0, 32)}
    assert package.manifest["plugin_layers"]["MatMulNBits"] == 15
    arguments = [str(folder), "--lengths", "1,9", "--decode-steps", "5", "--quiet"]

    assert call("build", str(folder), "--quiet") == 0, capsys.readouterr()
    assert call("verify", *arguments) == 0, capsys.readouterr().out
    loss = json.loads((folder / "verify/report.json").read_text())["quantization_loss"]
    assert loss["kl"] > 0 and loss["kl_rounded"] is None
    shutil.rmtree(folder / "verify")
    monkeypatch.setattr(read, "row_readers", lambda *_: {})
    assert call("verify", *arguments) == 1
