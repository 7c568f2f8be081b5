"""A tiny random model of bytes with a chat format, as a package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import still_export
from still_export.graph.options import ExportOptions
from still_export.targets.export import export
from tests.still_export.tiny import MIXED, still_model
from tests.still_export.training import byte_tokenizer

if TYPE_CHECKING:
    from still_export import LanguageModel
    from tests.still_export.serving.served import Served

CONTEXT = 200
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def exported(folder: Path, family: str, speculate: int = 0, context: int = CONTEXT, **still: str) -> Path:
    """A package of hybrid and softmax layers, chunks of 8 tokens, a capacity of `context` tokens."""
    import torch

    sizes = dict(vocab_size=257, eos_token_id=256, bos_token_id=None, pad_token_id=None)
    model = still_model(family, torch.float32, sizes=sizes, layer_types=MIXED, capacity_tokens=context, **still)
    model.save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    request = ExportOptions(str(folder / "model"), speculate=speculate)
    return export(request, folder / "tiny", command="still-export tiny").path


@pytest.fixture(scope="session")
def byte_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package as it is without options."""
    return exported(tmp_path_factory.mktemp("served"), "llama")


@pytest.fixture(scope="module")
def served(byte_package: Path) -> Iterator[Served]:
    """A server of it, for three users at a time."""
    from still_export.serving.app import Settings
    from tests.still_export.serving.served import serve

    with serve(byte_package, Settings("tiny", None, 50_000), rows=3, waiting=8, piece=16) as served:
        yield served


@pytest.fixture(scope="module")
def model(byte_package: Path) -> LanguageModel:
    """The same package in this process."""
    return still_export.load(byte_package, threads=1)


@pytest.fixture(scope="session")
def guessing_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tokens may be guessed in a step."""
    return exported(tmp_path_factory.mktemp("guessing"), "llama", speculate=4)


@pytest.fixture(scope="session")
def codes_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and values in 8 bits."""
    return exported(tmp_path_factory.mktemp("codes"), "qwen2", cache="int8")
