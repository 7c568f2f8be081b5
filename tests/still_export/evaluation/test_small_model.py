"""The repository's own model: it finds facts in 4096 tokens through ONNX Runtime, by its salient tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from still_export.evaluation.evaluate import DEFAULT_HAYSTACK, answered, without
from still_export.export.onnx_package import ExportOptions, export_onnx
from still_export.linearization.tasks import TASKS, TaskWriter
from still_export.linearization.texts import tokenize
from still_export.mixers.config import FULL, HYBRID, StillConfig
from still_export.models.load import load_model, load_tokenizer
from still_export.runners.ort import OrtModel
from still_export.runners.sampling import Sampling

SMALL = Path(__file__).parents[3] / "assets" / "small"
LENGTHS = (1024, 4096)


def prompts(length: int, count: int) -> list[tuple[np.ndarray, int]]:
    """Needle prompts at `count` depths, with their answers' lengths."""
    tokenizer = load_tokenizer(SMALL)
    writer = TaskWriter(tokenizer, tokenize(DEFAULT_HAYSTACK, tokenizer, 1024))
    rng = np.random.default_rng(length)
    return [writer.prompt(TASKS["needle"], length, i / max(1, count - 1), rng) for i in range(count)]


def test_fits_the_repository() -> None:
    assert sum(path.stat().st_size for path in SMALL.rglob("*") if path.is_file()) < 6_000_000
    assert load_model(SMALL).dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "softmax"), [("smollm2-135m-instruct", ()), ("smollm2-135m-instruct-mixed", (17, 18, 20, 23))]
)
def test_adapter_of_smollm2_is_complete(name: str, softmax: tuple[int, ...]) -> None:
    """Its base is too large for a test; tools/demo.sh runs the two together."""
    folder = SMALL.parent / name
    tensors = load_file(folder / "adapter_model.safetensors")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8_000_000
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    still = StillConfig.from_dict(json.loads((folder / "adapter_config.json").read_text())["still_config"])
    assert still.window_factors is not None and [len(row) for row in still.window_factors] == [9] * 30
    targets = [f"{p}_proj.lora_{m}.default.weight" for p in "qkvog" for m in "AB"]
    names = ["feature_q_weight", "feature_k_weight", "g_proj.bias", *targets]
    hybrid = [layer for layer in range(30) if layer not in softmax]
    assert still.layer_types == (tuple(HYBRID if i in hybrid else FULL for i in range(30)) if softmax else None)
    assert set(tensors) == {f"model.layers.{layer}.self_attn.{name}" for layer in hybrid for name in names}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "package"
    export_onnx(ExportOptions(model=str(SMALL), dtype="float32"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_finds_needles_through_onnx_runtime(package: Path, length: int) -> None:
    model = OrtModel(package, threads=1)
    found = []
    for ids, count in prompts(length, 8):
        model.start()
        answer = list(model.generate(ids[:-count].tolist(), count, Sampling()))
        found.append(answer == ids[-count:].tolist())
    assert sum(found) >= 7


def test_without_salient_tokens_it_finds_less() -> None:
    model = load_model(SMALL, dtype="float32")
    asked = prompts(1024, 6)
    with torch.no_grad(), without(model, "no_salient_tokens"):
        hits = sum(answered(model, torch.from_numpy(ids[None]), [count]) for ids, count in asked)
    assert hits <= 2
