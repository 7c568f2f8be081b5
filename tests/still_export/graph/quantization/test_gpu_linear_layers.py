"""Low-bit weights for ONNX Runtime's CUDA provider: products of our kernels, whose bodies are ONNX Runtime's own op."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.policy import Quantization, rounds_activations
from still_export.graph.quantization.read import with_package_weights
from still_export.loading.torch import TorchModel
from still_export.models.read.source import find_source
from still_export.package.calls import next_feed
from still_export.package.folder import Package
from still_export.runtime.ort import OrtModel
from still_export.runtime.ort_session import native_library
from still_export.targets.ort.kernels import kernel_variants
from still_export.targets.registry import target_of
from tests.still_export.conftest import Exporter
from tests.still_export.tiny import MIXED, VOCAB
from tests.still_graphs.protos import attribute

SIZES = dict(hidden_size=96, intermediate_size=160, num_attention_heads=8, head_dim=16, tie_word_embeddings=True)


def empty_library(folder: Path, *_: Any) -> dict[str, Any]:
    """What add_native says of a library, which is empty."""
    (folder / "libstill_onnxruntime.so").touch()
    system, machine = platform.system(), platform.machine()
    return {"library": "libstill_onnxruntime.so", "system": system, "machine": machine, "archs": ["sm_90"]}


@pytest.fixture
def package(export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch) -> Package:
    """As for GPUs, but without what is in the library."""
    monkeypatch.setattr("still_export.targets.ort.target.demand_build", lambda *a: None)
    monkeypatch.setattr("still_export.targets.ort.target.add_native", empty_library)
    options = {"quantize": "int4", "native": True, "archs": ("sm_90",)}
    return export_tiny("llama", "float16", options, sizes=SIZES, layer_types=MIXED)


@pytest.mark.slow
def test_products_are_ours_and_their_bodies_onnxruntimes(package: Package) -> None:
    graph = onnx.load(package.model_path, load_external_data=False)
    nodes = [n for n in graph.graph.node if n.op_type == "MatMulNBits"]
    assert {(n.domain, attribute(n, "block_size")) for n in nodes} == {("still", 32)}
    bodies = [f for f in graph.functions if f.name == "MatMulNBits"]
    assert bodies and all([n.domain for n in f.node if n.op_type == "MatMulNBits"] == ["com.microsoft"] for f in bodies)
    places = {i.name: {e.key: e.value for e in i.external_data} for i in graph.graph.initializer if i.external_data}
    (rows,) = [name for name in places if name.endswith(".rows")]
    words = rows.removesuffix(".rows") + ".blocks"
    assert places[rows]["offset"] == places[words]["offset"], "a tied embedding is stored once"
    assert package.manifest["ops"]["MatMulNBits"] == 1 and not rounds_activations(package.manifest)
    runner = OrtModel(package.path)
    runner.start(1)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (1, 20))
    actual = runner.feed(tokens).astype(np.float32)
    held = with_package_weights(
        find_source(ExportOptions.from_manifest(package.manifest)), package.path, package.manifest
    )
    reference = TorchModel(package.manifest, held.read().float())
    expected = reference.infer({**next_feed({}, tokens, None), **reference.empty_feed(1, 20)})["logits"]
    assert float(np.abs(expected.astype(np.float32) - actual).mean()) < 4e-3


@pytest.mark.slow
def test_the_library_gets_their_kernels_and_a_cpu_does_without(
    package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = _variants_of_products(package)
    assert {(v.bits, v.zero_points, v.dtype) for v in variants} == {(4, 1, "float16"), (8, 0, "float16")}
    assert native_library(package.path, package.manifest) is None
    assert "linear layers are for GPUs: running without them" in capsys.readouterr().err


def _variants_of_products(package: Package) -> list[Any]:
    """Without the other ops, whose chunks are too small here."""
    graph = onnx.load(package.model_path, load_external_data=False)
    for node in [n for n in graph.graph.node if n.domain == "still" and n.op_type != "MatMulNBits"]:
        graph.graph.node.remove(node)
    path = package.path / "products.onnx"
    onnx.save(graph, path)
    return kernel_variants(path)["MatMulNBits"]


def test_blocks_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="--quantize-block 16: ONNX Runtime's kernels for GPUs has 32, 64, 128"):
        Quantization("int4", block_size=16, layout=target_of("ort-cuda").layout_for("float16"))
    assert Quantization("int4", layout=target_of("ort-cuda").layout_for("float16"), adapters=True).to == "onnx"
