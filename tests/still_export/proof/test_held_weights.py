"""Weights held to the model's: right packages pass in every layout, whatever is changed in one fails with its weight named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from still_export.graph.options import ExportOptions
from still_export.models.read.source import find_source
from still_export.package.folder import Package, open_package
from still_export.proof.held_weights import check_weights
from still_export.proof.verdict import Verdict
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from tests.still_export.conftest import Exporter
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.proof.plants import exchange, planted, searched_copy, with_weights
from tests.still_export.tiny import plain_model, still_model

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2
)
LAYERS = ("hybrid_attention", "full_attention", "hybrid_attention")
DOWN, ATTENTION = "mlp.down_proj.weight", "self_attn.o_proj.weight"
QKV = "|".join(f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv")
GATE_UP = "model.layers.1.mlp.gate_proj.weight|model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"

Weights = dict[str, np.ndarray]
Change = Callable[[Weights], None]


def held(package: Package) -> Verdict:
    options = replace(ExportOptions.from_manifest(package.manifest), dtype="float32")
    return check_weights(package.path, package.manifest, find_source(options))


def layer(number: int, rest: str) -> str:
    return f"model.layers.{number}.{rest}"


def parts(weights: Weights, name: str) -> list[np.ndarray]:
    return [weights[f"{name}.{part}"] for part in ("blocks", "scales", "zero_points")]


def put(array: np.ndarray, change: Callable[[np.ndarray], Any]) -> None:
    array[...] = change(array.copy())


def turned_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes << 4 | codes >> 4


def heads_exchanged(weights: Weights) -> None:
    """Columns of o_proj: what head 0 gives is read as head 2's."""
    codes, scales, zero = parts(weights, layer(1, ATTENTION))
    exchange(codes[:, 0], codes[:, 1])
    exchange(scales[:, 0], scales[:, 1])
    put(zero, turned_nibbles)


SCALES, CODES = f"{DOWN}.scales", f"{ATTENTION}.blocks"
LOW_BIT: dict[str, tuple[str, Change]] = {
    "scales doubled": (layer(0, DOWN), lambda w: put(w[layer(0, SCALES)], lambda x: 2 * x)),
    "scales zero": (layer(0, DOWN), lambda w: put(w[layer(0, SCALES)], np.zeros_like)),
    "zero points raised": (
        layer(0, ATTENTION),
        lambda w: put(w[layer(0, f"{ATTENTION}.zero_points")], lambda x: x + 0x11),
    ),
    "codes of layers exchanged": (ATTENTION, lambda w: exchange(w[layer(0, CODES)], w[layer(2, CODES)])),
    "gate and up exchanged": (
        "model.layers.1.mlp.",
        lambda w: [put(x, lambda x: np.roll(x, len(x) // 2, 0)) for x in parts(w, GATE_UP)],
    ),
    "nibbles exchanged": ("model.layers.1.self_attn.", lambda w: put(w[f"{QKV}.blocks"], turned_nibbles)),
    "heads exchanged": (layer(1, ATTENTION), heads_exchanged),
    "dead blocks": (DOWN, lambda w: [put(w[layer(number, SCALES)][:, 1], np.zeros_like) for number in range(3)]),
    "scales transposed": (layer(1, DOWN), lambda w: put(w[layer(1, SCALES)], lambda x: x.T.reshape(x.shape))),
    "a token lost": (EMBEDDING, lambda w: put(w[f"{EMBEDDING}.scales"][37:38], np.zeros_like)),
}
"""The ten faults of low-bit weights that a proof once did not see, by what must be named."""
SQUARE, KEY = layer(1, "self_attn.q_proj.weight"), layer(2, "self_attn.k_proj.weight")
FLOATS: dict[str, tuple[str, Change]] = {
    "layers exchanged": (DOWN, lambda w: exchange(w[layer(0, DOWN)], w[layer(2, DOWN)])),
    "turned": (SQUARE, lambda w: put(w[SQUARE], np.transpose)),
    "rows lost": (EMBEDDING, lambda w: put(w[EMBEDDING][40:], np.zeros_like)),
    "one bit": (KEY, lambda w: put(w[KEY][3, 5:6].view({2: np.int16, 4: np.int32}[w[KEY].itemsize]), lambda x: x ^ 1)),
    "not a number": ("lm_head", lambda w: put(w["lm_head.weight"][7, 7:8], lambda x: x * np.nan)),
}
"""To the last bit."""


def demand_named(package: Package, faults: dict[str, tuple[str, Change]], folder: Path) -> None:
    right = held(package)
    assert right.passed, right.checks
    for fault, (name, change) in faults.items():
        check = held(with_weights(package, folder / fault, change)).checks[0]
        assert not check.passed and name in check.where and check.where in check.what, (fault, check)


@pytest.fixture
def int4(export_tiny: Exporter) -> Package:
    return export_tiny("llama", options={"quantize": "int4", "native": False}, sizes=SIZES, layer_types=LAYERS)


def test_every_fault_of_codes_is_seen(int4: Package, tmp_path: Path) -> None:
    """Held to what rounding may lose, and gptq."""
    demand_named(int4, LOW_BIT, tmp_path / "rounded")
    demand_named(searched_copy(int4, tmp_path / "searched"), LOW_BIT, tmp_path / "gptq")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_fault_of_floats_is_seen(dtype: str, export_tiny: Exporter, tmp_path: Path) -> None:
    demand_named(export_tiny("llama", dtype, sizes=SIZES, layer_types=LAYERS), FLOATS, tmp_path)


@pytest.mark.parametrize("final", ["trt", "trt8", "web", "genai"])
@pytest.mark.parametrize("scheme", ["int4", "int8", None])
def test_layouts_of_all_targets_pass(final: str, scheme: str | None, export_tiny: Exporter) -> None:
    dtype = "float32" if final in ("web", "genai") else "float16"
    options: dict[str, Any] = {} if scheme is None else {"quantize": scheme}
    if scheme == "int4" and final in ("trt", "trt8"):
        options["quantize_block"] = 32 if final == "trt8" else 64
    sizes = {**SIZES, "intermediate_size": 128}
    verdict = held(export_tiny("llama", dtype, options, final, sizes=sizes, layer_types=LAYERS))
    assert verdict.passed and not verdict.not_asked, (verdict.checks, verdict.not_asked)


@pytest.mark.parametrize(("size", "longer"), [(7e-4, 1.02), (2e-5, 1.5)])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_steps_that_are_too_small_for_float16_pass(scheme: str, size: float, longer: float, tmp_path: Path) -> None:
    """Below 6e-5 float16 rounds a step, and a weight, by up to 2^-25; steps that are a few of these too long are still seen."""
    model = still_model("llama", torch.float32, sizes=SIZES, layer_types=LAYERS)
    small = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        small.copy_(torch.randn(small.shape, generator=torch.Generator().manual_seed(0)) * size)
    model.save_pretrained(tmp_path / "model")
    options = ExportOptions(str(tmp_path / "model"), dtype="float16", quantize=scheme)
    package = export(options, tmp_path / "package", options=OrtOptions(native=False))
    assert held(package).passed

    def off(weights: Weights) -> None:
        weights[layer(1, f"{DOWN}.scales")][...] *= np.float16(longer)

    assert not held(with_weights(package, tmp_path / "off", off)).passed


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_gguf_codes_are_taken_over_exactly(quantize: str | None, exports_once: None, tmp_path: Path) -> None:
    """Blocks of a GGUF file: one code that is off by a step, half a step being allowed to rounding alone, is seen."""
    gguf = pytest.importorskip("gguf")
    from gguf.quants import quantize as rounded

    kind = gguf.GGMLQuantizationType.Q4_0

    def coded(name: str, value: torch.Tensor) -> Any:
        return (rounded(value.numpy(), kind), kind) if name.startswith("blk.") and value.dim() == 2 else None

    write_gguf(tmp_path / "m.gguf", plain_model("llama", torch.float32, **SIZES), coded)
    options = ExportOptions(str(tmp_path / "m.gguf"), attach_untrained=True, quantize=quantize)
    package = export(options, tmp_path / "package", options=OrtOptions(native=False))
    assert held(package).passed
    if quantize is None:
        return

    def scale_off(weights: Weights) -> None:
        weights[layer(1, f"{DOWN}.scales")][3, 1] *= 1.01

    check = held(with_weights(package, tmp_path / "off", scale_off)).checks[0]
    assert not check.passed and check.where == layer(1, DOWN)


def test_a_weight_that_only_its_name_shows_is_seen(export_tiny: Exporter, tmp_path: Path) -> None:
    """The embedding under its own name is read by a node that no output needs, and another one is read."""
    package = export_tiny("llama", sizes=SIZES, layer_types=LAYERS)
    source = find_source(ExportOptions.from_manifest(package.manifest))
    right = check_weights(package.path, package.manifest, source)
    assert right.passed and len(right.checks) == 2, right
    with planted(package, tmp_path / "decoy") as folder:
        graph = onnx.load(folder / "model.onnx")
        table = next(t for t in graph.graph.initializer if t.name == EMBEDDING)
        for node in graph.graph.node:
            for number, name in enumerate(node.input):
                if name == EMBEDDING:
                    node.input[number] = "other"
        values = onnx.numpy_helper.to_array(table).copy()
        values[40:] = 0
        graph.graph.initializer.append(onnx.numpy_helper.from_array(values, "other"))
        graph.graph.node.insert(0, onnx.helper.make_node("Gather", [EMBEDDING, "input_ids"], ["unread"], name="unread"))
        (folder / "model.onnx").unlink()
        onnx.save(graph, folder / "model.onnx")
    verdict = check_weights(folder, open_package(folder).manifest, source)
    (check,) = [check for check in verdict.checks if not check.passed]
    assert check.where == "model.onnx" and EMBEDDING in check.what
