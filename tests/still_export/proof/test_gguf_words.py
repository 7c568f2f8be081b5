"""The words of a GGUF file against those of the tokenizer that is made of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch

from still_export.graph.options import ExportOptions
from still_export.models import load
from still_export.package.folder import open_package
from still_export.proof.whole_package import _check_gguf_words, check_files
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.proof.plants import planted
from tests.still_export.tiny import CHUNK, VOCAB, plain_model

TEMPLATE = "{% for m in messages %}<|s|>{{ m.role }} {{ m.content }}<|e|>{% endfor %}{% if add_generation_prompt %}<|s|>{% endif %}"


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


def with_words(writer: Any) -> None:
    words = ["<|endoftext|>", "<|s|>", "<|e|>", *map(chr, range(33, 33 + VOCAB - 5)), "\u0120", "\u010a"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)


def test_faults_of_a_package_of_a_gguf_file_are_seen(
    exports_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its chat format, its settings and its words; and a chat template that was read as another."""
    source = tmp_path / "m.gguf"
    write_gguf(source, plain_model("qwen3", torch.float32), extra=with_words)
    still = {"chunk_size": CHUNK, "salient_per_chunk": 3}
    options = ExportOptions(str(source), attach_untrained=True, still=still)
    package = export(options, tmp_path / "package", options=OrtOptions(native=False))
    assert check_files(package, source).passed
    faults = {
        "manifest.json": ("<|e|>{% endfor %}", "{% endfor %}"),
        "generation_config.json": ('"eos_token_id"', '"top_k": 1, "eos_token_id"'),
        "tokenizer.json": ('"!": 3', '"!": 4'),
        "chat_template.jinja": ("m.role", "m.name"),
    }
    for name, (right, other) in faults.items():
        with planted(package, tmp_path / name.partition(".")[0]) as folder:
            text = (folder / name).read_text(encoding="utf-8")
            assert right in text, name
            (folder / name).write_text(text.replace(right, other), encoding="utf-8")
        assert not check_files(open_package(folder), source).passed, name
    read = load.load_tokenizer(str(source))
    read.chat_template = json.dumps(TEMPLATE)
    monkeypatch.setattr(load, "load_tokenizer", lambda source: read)
    assert not _check_gguf_words(source).checks[0].passed
