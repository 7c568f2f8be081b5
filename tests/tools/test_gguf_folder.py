"""A GGUF file becomes the folder that genai's builder reads, which is the same model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.tiny import plain_model, random_ids
from tests.still_export.training import byte_tokenizer
from tools.gguf_folder import write_folder


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_folder_of_a_gguf_file(family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights and the configuration; the tokenizer is read by what tests/still_export/models/test_load.py covers."""
    pytest.importorskip("gguf")
    monkeypatch.setattr("still_export.gguf.tokenizer.read_tokenizer", lambda path: byte_tokenizer())
    model = plain_model(family, torch.float32, tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", model)
    folder = write_folder(tmp_path / "m.gguf", tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.config.architectures == [type(model).__name__]
    ids = random_ids(2, 9)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("sea").input_ids == byte_tokenizer()("sea").input_ids
