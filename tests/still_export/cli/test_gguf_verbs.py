"""Verbs that take a GGUF file in the place of a package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from still_export.cli.output import Output
from tests.still_export.linear_models import linear_model
from tests.still_export.tiny import plain_model
from tests.still_export.verbs import call

pytest.importorskip("gguf")
from tests.still_export.models.gguf_files import write_gguf


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An LFM2 whose tokens are bytes, and its folder beside."""
    monkeypatch.setenv("STILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STILL_BUILD_KERNELS", "0")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 256 + [3])
        writer.add_eos_token_id(256)

    write_gguf(tmp_path / "lfm.gguf", linear_model("lfm2", vocab_size=len(tokens), tie_word_embeddings=True), extra=add)
    return tmp_path / "lfm.gguf"


@pytest.mark.slow
def test_a_file_is_run_to_the_end(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    assert call("run", file, "--prompt", "Hi you", "--tokens", "5", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(file.with_suffix(".folder")).eval()
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    prompt = torch.tensor([[symbols.index(letter) for letter in "Hi\u0120you"]])
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert said["tokens"] == expected[0, 6:].tolist()
    (made,) = (file.parent / "cache" / "packages").iterdir()
    (made / "model.onnx").unlink()
    assert call("run", file, "--prompt", "Hi you", "--tokens", "5", "--json") == 0
    again = capsys.readouterr()
    assert json.loads(again.out)["tokens"] == said["tokens"] and "It is exported again." in again.err
    monkeypatch.setattr("still_export.targets.export.export", None)  # the package is kept: nothing is exported again
    assert call("bench", file, "--lengths", "16", "--steps", "2", "--quiet", "-o", file.parent / "bench") == 0
    assert json.loads((file.parent / "bench" / "bench.json").read_text())["package"] == str(made)


def test_serve_takes_a_file_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it loads is the package of the file."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    asked: list[Path] = []

    def package_of(path: Path, out: Output) -> Path:
        asked.append(path)
        return tmp_path / "made"

    monkeypatch.setattr("still_export.cli.gguf_package.package_of", package_of)
    assert call("serve", tmp_path / "model.gguf", "--port", "0") == 2  # there is no such package
    assert asked == [tmp_path / "model.gguf"]


def test_run_of_a_softmax_file_says_how_to_linearize_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STILL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "plain.gguf"
    write_gguf(file, plain_model("llama", torch.float32))
    assert call("run", file, "--prompt", "Hi") == 2
    assert f"still-export linearize {file} -o" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
