"""The repository's own model: it finds facts in 4096 tokens through ONNX Runtime, by its salient tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from still_export.evaluate import DEFAULT_HAYSTACK, answered, without
from still_export.linearization.tasks import TASKS, TaskWriter
from still_export.linearization.texts import tokenize
from still_export.load import load_model, load_tokenizer
from still_export.onnx_package import ExportOptions, export_onnx
from still_export.runners.ort import OrtModel, Sampling

SMALL = Path(__file__).parents[2] / "assets" / "small"
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


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "package"
    export_onnx(ExportOptions(model=str(SMALL), dtype="float32"), folder)
    return folder


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
