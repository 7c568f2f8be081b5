"""The words of a GGUF file against those of the tokenizer that is made of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from still_export.models import load
from still_export.proof.whole_package import _check_gguf_words


@pytest.mark.parametrize(("kind", "right"), [(gguf.TokenType.UNUSED, True), (gguf.TokenType.NORMAL, False)])
def test_unused_words_alone_may_be_missing(kind: Any, right: bool, tmp_path: Path, monkeypatch: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_token_list(["a", "b", "[PAD2]"])
    writer.add_token_types([gguf.TokenType.NORMAL, gguf.TokenType.NORMAL, kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    known = SimpleNamespace(convert_ids_to_tokens=lambda ids: ["a", "b", None])
    monkeypatch.setattr(load, "load_tokenizer", lambda source: known)
    assert all(check.passed for check in _check_gguf_words(tmp_path / "m.gguf").checks) == right
