"""tools/bench_genai.py: a GGUF file becomes the folder that genai's builder reads, which is the same model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.still_export.models.test_load import write_gguf
from tests.still_export.tiny import plain_model, random_ids
from tests.still_export.training import byte_tokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools/bench_genai.py"


@pytest.fixture
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("bench_genai", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_folder_of_a_gguf_file(
    family: str, tied: bool, tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights and the configuration; the tokenizer is read by what tests/still_export/models/test_load.py covers."""
    pytest.importorskip("gguf")
    monkeypatch.setattr("still_export.models.gguf.read_tokenizer", lambda path: byte_tokenizer())
    model = plain_model(family, torch.float32, tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", family, model)
    folder = tool.write_folder(tmp_path / "m.gguf", tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.config.architectures == [type(model).__name__]
    ids = random_ids(2, 9)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("sea").input_ids == byte_tokenizer()("sea").input_ids
