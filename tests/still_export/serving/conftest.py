"""A tiny random model of bytes with a chat format, as a package."""

from __future__ import annotations

from pathlib import Path

import pytest

from still_export.export.onnx_package import ExportOptions, export_onnx
from tests.still_export.tiny import MIXED, still_model
from tests.still_export.training import byte_tokenizer

CONTEXT = 200
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="session")
def byte_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hybrid and softmax layers, chunks of 8 tokens, a capacity of CONTEXT tokens."""
    import torch

    folder = tmp_path_factory.mktemp("served")
    sizes = dict(vocab_size=257, eos_token_id=256, bos_token_id=None, pad_token_id=None)
    model = still_model("llama", torch.float32, sizes=sizes, layer_types=MIXED, capacity_tokens=CONTEXT)
    model.save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    request = ExportOptions(str(folder / "model"))
    return export_onnx(request, folder / "tiny", command="still-export tiny").path
